// MSL for the host simulator: simdgroup functions and barriers are rendezvous points of the
// simulated threads.
#pragma once

#include "bind.h"
#include "functions.h"
#include "hooks.h"
#include "types.h"

// MSL's attributes and loop pragmas mean nothing to a C++ compiler, and a kernel may ignore
// built-ins.
#pragma GCC diagnostic ignored "-Wunused-parameter"
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wunknown-attributes"
#pragma clang diagnostic ignored "-Wignored-attributes"
#pragma clang diagnostic ignored "-Wpass-failed"
#else
#pragma GCC diagnostic ignored "-Wattributes"
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#endif

namespace vqkv::sim {

template <auto F>
struct Bind {
  using S = Signature<decltype(F), metal::vec<uint, 3>>;

  static void invoke(void* const* buffers, const void* params, const Builtins& b) {
    call(buffers, params, b, typename S::Buffers{});
  }

 private:
  template <size_t... I>
  static void call(void* const* buffers, const void* params, const Builtins& b,
                   std::index_sequence<I...>) {
    F(static_cast<typename S::template Arg<I>>(buffers[I])...,
      *static_cast<const typename S::Params*>(params),
      metal::vec<uint, 3>(b.tgid[0], b.tgid[1], b.tgid[2]), b.tid, b.lane, b.sg);
  }
};

// In the order of a butterfly of shuffles, so that CUDA rounds alike.
template <typename T, typename Op>
inline T reduce(T x, Op op, const char* name, Site site) {
  Exchange& e = exchange(&x, sizeof(T), name, site);
  T v[32];
  if (e.has_result) {
    memcpy(&v[0], e.result, sizeof(T));
    return v[0];
  }
  for (unsigned i = 0; i < e.lanes; i++) {
    memcpy(&v[i], e.posted[i], sizeof(T));
  }
  for (unsigned h = 16; h >= 1; h >>= 1) {
    for (unsigned i = 0; i < h && i + h < e.lanes; i++) {
      v[i] = op(v[i], v[i + h]);
    }
  }
  memcpy(e.result, &v[0], sizeof(T));
  e.has_result = true;
  return v[0];
}

template <typename T>
inline T pick(T x, unsigned source, const char* name, Site site) {
  const Exchange& e = exchange(&x, sizeof(T), name, site);
  T r;
  memset(static_cast<void*>(&r), 0xff, sizeof(T));  // poison where there is no such lane
  if (source < e.lanes) {
    memcpy(&r, e.posted[source], sizeof(T));
  }
  return r;
}

}  // namespace vqkv::sim

namespace metal {

#define MSL_SITE vqkv::sim::Site site = vqkv::sim::Site::here()

template <typename T>
inline T simd_sum(T x, MSL_SITE) {
  return vqkv::sim::reduce(x, op_add{}, "simd_sum", site);
}
template <typename T>
inline T simd_max(T x, MSL_SITE) {
  return vqkv::sim::reduce(x, op_max{}, "simd_max", site);
}
template <typename T>
inline T simd_min(T x, MSL_SITE) {
  return vqkv::sim::reduce(x, op_min{}, "simd_min", site);
}
template <typename T>
inline T simd_shuffle(T x, ushort i, MSL_SITE) {
  return vqkv::sim::pick(x, i, "simd_shuffle", site);
}
template <typename T>
inline T simd_broadcast(T x, ushort i, MSL_SITE) {
  return vqkv::sim::pick(x, i, "simd_broadcast", site);
}
template <typename T>
inline T simd_shuffle_xor(T x, ushort mask, MSL_SITE) {
  return vqkv::sim::pick(x, vqkv::sim::lane() ^ mask, "simd_shuffle_xor", site);
}
template <typename T>
inline T simd_shuffle_down(T x, ushort delta, MSL_SITE) {
  return vqkv::sim::pick(x, vqkv::sim::lane() + delta, "simd_shuffle_down", site);
}
template <typename T>
inline T simd_shuffle_up(T x, ushort delta, MSL_SITE) {
  return vqkv::sim::pick(x, vqkv::sim::lane() - delta, "simd_shuffle_up", site);
}

inline ulong ballot(bool b, const char* name, vqkv::sim::Site site) {
  const unsigned char vote = b;
  const vqkv::sim::Exchange& e = vqkv::sim::exchange(&vote, 1, name, site);
  ulong votes = 0;
  for (uint i = 0; i < e.lanes; i++) {
    votes |= ulong(e.posted[i][0]) << i;
  }
  return votes;
}
inline simd_vote simd_ballot(bool b, MSL_SITE) {
  return simd_vote(ballot(b, "simd_ballot", site));
}
inline bool simd_any(bool b, MSL_SITE) {
  return ballot(b, "simd_any", site) != 0;
}
inline bool simd_all(bool b, MSL_SITE) {
  return ballot(!b, "simd_all", site) == 0;
}

inline void threadgroup_barrier(mem_flags memory, MSL_SITE) {
  vqkv::sim::barrier(uint(memory), "threadgroup_barrier", site);
}
inline void simdgroup_barrier(mem_flags memory, MSL_SITE) {
  vqkv::sim::simdgroup_barrier(uint(memory), "simdgroup_barrier", site);
}

#define threadgroups_in_grid(n) int(vqkv::sim::threadgroups())
#define TABLE_ROW_BYTES 64

// Elements lie as in Apple's GPUs.
inline uint matrix_row(uint lane) {
  return ((lane >> 2) & 4u) + ((lane >> 1) & 3u);
}
inline uint matrix_column(uint lane) {
  return ((lane >> 1) & 4u) + ((lane & 1u) << 1);
}
inline uint matrix_lane(uint row, uint column) {
  return ((row & 4u) << 2) | ((row & 3u) << 1) | ((column & 4u) << 1) | ((column >> 1) & 1u);
}
template <typename Pair>
inline Pair matrix_right(Pair b) {
  return b;
}
template <typename Pair>
inline Pair matrix_right_transposed(Pair b, uint lane, MSL_SITE) {
  const uint row = matrix_row(lane), column = matrix_column(lane);
  const Pair first = simd_shuffle(b, ushort(matrix_lane(column, row)), site);
  const Pair second = simd_shuffle(b, ushort(matrix_lane(column + 1, row)), site);
  return Pair(first[row & 1], second[row & 1]);
}
template <typename T>
inline void matrix_right_paired(vec<T, 2>* b, float x, uint lane, MSL_SITE) {
  const float other = simd_shuffle_xor(x, ushort(2), site);
  const bool odd = (lane & 2u) != 0;
  const T first = T(odd ? other : x), second = T(odd ? x : other), zero = T(0.0f);
  b[0] = odd ? vec<T, 2>(zero, first) : vec<T, 2>(first, zero);
  b[1] = odd ? vec<T, 2>(zero, second) : vec<T, 2>(second, zero);
}
inline float matrix_from_row(float x, uint row, uint lane, MSL_SITE) {
  return simd_shuffle(x, ushort(matrix_lane(row, matrix_column(lane))), site);
}
// c[i] += a[2 i] b[0] + a[2 i + 1] b[1]. An element (row, column) is one of the pair of lane
// lane_of(row, column); of the right matrices, which are transposed with RIGHT_COLUMNS, too.
template <bool RIGHT_COLUMNS, typename T>
inline void multiply_add(vec<float, 2>* c, const vec<T, 2>* a, const vec<T, 2>* b, uint row,
                         uint column, uint (*lane_of)(uint, uint), const char* name,
                         vqkv::sim::Site site) {
  auto element = [&](const vqkv::sim::Exchange& e, uint matrix, uint i, uint j) {
    vec<T, 2> pair;
    memcpy(static_cast<void*>(&pair), e.posted[lane_of(i, j)] + matrix * sizeof(pair),
           sizeof(pair));
    return float(pair[j & 1]);
  };
  float left[2][16];  // read before the next exchange begins
  const auto& lefts = vqkv::sim::exchange(a, 4 * sizeof(*a), name, site);
  for (uint i = 0; i < 2; i++) {
    for (uint k = 0; k < 16; k++) {
      left[i][k] = element(lefts, 2 * i + k / 8, row, k % 8);
    }
  }
  const auto& rights = vqkv::sim::exchange(b, 2 * sizeof(*b), name, site);
  for (uint j = 0; j < 2; j++) {
    for (uint k = 0; k < 16; k++) {
      const float right = RIGHT_COLUMNS ? element(rights, k / 8, column + j, k % 8)
                                        : element(rights, k / 8, k % 8, column + j);
      for (uint i = 0; i < 2; i++) {
        c[i][j] = fma(left[i][k], right, c[i][j]);
      }
    }
  }
}
template <typename T>
inline void matrix_multiply_add(vec<float, 2>* c, const vec<T, 2>* a, const vec<T, 2>* b,
                                MSL_SITE) {
  const uint lane = vqkv::sim::lane();
  multiply_add<false>(c, a, b, matrix_row(lane), matrix_column(lane), matrix_lane,
                      "matrix_multiply_add", site);
}
// As on CUDA: a row of four neighbouring lanes.
#define QUAD_MATRICES 1
inline uint quad_lane(uint row, uint column) {
  return row << 2 | column >> 1;
}
template <typename T>
inline void quad_multiply_add(vec<float, 2>* c, const vec<T, 2>* a, const vec<T, 2>* b, MSL_SITE) {
  const uint lane = vqkv::sim::lane();
  multiply_add<true>(c, a, b, lane >> 2, (lane & 3u) << 1, quad_lane, "quad_multiply_add", site);
}
template <typename T>
inline void quad_multiply(vec<float, 2>* c, const vec<T, 2>* a, const vec<T, 2>* b, MSL_SITE) {
  c[0] = c[1] = vec<float, 2>(0.0f);
  quad_multiply_add(c, a, b, site);
}
inline uint table_row(uint word, int i, uint at) {
  return (word >> 8 * i & 255u) * TABLE_ROW_BYTES + at;
}
inline uint word_at(uint low, uint high, uint bit) {
  return uint((ulong(high) << 32 | low) >> bit);
}
inline float matrix_sum_rows(float x, MSL_SITE) {
  for (ushort h : {2, 4, 16}) {
    x += simd_shuffle_xor(x, h, site);
  }
  return x;
}
inline float matrix_max_rows(float x, MSL_SITE) {
  for (ushort h : {2, 4, 16}) {
    x = max(x, simd_shuffle_xor(x, h, site));
  }
  return x;
}
inline float matrix_sum_columns(float x, MSL_SITE) {
  x += simd_shuffle_xor(x, ushort(1), site);
  return x + simd_shuffle_xor(x, ushort(8), site);
}
inline float matrix_max_columns(float x, MSL_SITE) {
  x = max(x, simd_shuffle_xor(x, ushort(1), site));
  return max(x, simd_shuffle_xor(x, ushort(8), site));
}
#undef MSL_SITE

}  // namespace metal

#include "sim_tiles.h"

using metal::matrix_column;
using metal::matrix_from_row;
using metal::matrix_lane;
using metal::matrix_max_columns;
using metal::matrix_max_rows;
using metal::matrix_multiply_add;
using metal::matrix_right;
using metal::matrix_right_paired;
using metal::matrix_right_transposed;
using metal::matrix_row;
using metal::matrix_sum_columns;
using metal::matrix_sum_rows;
using metal::quad_multiply;
using metal::quad_multiply_add;
using metal::table_row;
using metal::word_at;

#define kernel inline
#define METAL_FUNC inline __attribute__((always_inline))
#define threadgroup_array(T, name, ...)            \
  static char key_of_##name;                       \
  T(&name)                                         \
  [__VA_ARGS__] = *static_cast<T(*)[__VA_ARGS__]>( \
      vqkv::sim::threadgroup_memory(&key_of_##name, sizeof(T) * (__VA_ARGS__), alignof(T), #name))
#define threadgroup_bytes(name, n)                   \
  threadgroup_array(uint4, name##_memory, (n) / 16); \
  threadgroup uchar* name = (threadgroup uchar*)name##_memory
#define threadgroup_tables(name) threadgroup_bytes(name, 256 * TABLE_ROW_BYTES)
#define program_constant(T, name, ...) [[maybe_unused]] static constexpr T name[__VA_ARGS__]

#define UNROLL
#define instantiate_kernel_groups(name, threads, groups, ...) instantiate_kernel(name, __VA_ARGS__)
#define MSL_JOIN_(a, b) a##b
#define MSL_JOIN(a, b) MSL_JOIN_(a, b)
#define instantiate_kernel(name, func, ...)                          \
  static vqkv::sim::Registrar MSL_JOIN(msl_registrar_, __COUNTER__)( \
      #name, &vqkv::sim::Bind<&func<__VA_ARGS__>>::invoke,           \
      vqkv::sim::Bind<&func<__VA_ARGS__>>::S::info());

#include "names.h"

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

inline void threadgroup_barrier(mem_flags, MSL_SITE) {
  vqkv::sim::barrier("threadgroup_barrier", site);
}
inline void simdgroup_barrier(mem_flags, MSL_SITE) {
  vqkv::sim::exchange("", 1, "simdgroup_barrier", site);
}
#undef MSL_SITE

}  // namespace metal

#define kernel inline
#define METAL_FUNC inline __attribute__((always_inline))
#define threadgroup_array(T, name, ...)            \
  static char key_of_##name;                       \
  T(&name)                                         \
  [__VA_ARGS__] = *static_cast<T(*)[__VA_ARGS__]>( \
      vqkv::sim::threadgroup_memory(&key_of_##name, sizeof(T) * (__VA_ARGS__), alignof(T), #name))
#define program_constant(T, name, ...) [[maybe_unused]] static constexpr T name[__VA_ARGS__]

#define MSL_JOIN_(a, b) a##b
#define MSL_JOIN(a, b) MSL_JOIN_(a, b)
#define instantiate_kernel(name, func, ...)                          \
  static vqkv::sim::Registrar MSL_JOIN(msl_registrar_, __COUNTER__)( \
      #name, &vqkv::sim::Bind<&func<__VA_ARGS__>>::invoke,           \
      vqkv::sim::Bind<&func<__VA_ARGS__>>::S::info());

#include "names.h"

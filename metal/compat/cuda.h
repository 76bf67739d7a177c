// MSL for nvcc: a kernel becomes a __device__ function that a __global__ one calls. simdgroups are
// warps, so a kernel that uses simdgroup functions needs threads % 32 == 0.
#pragma once

#include <cuda_runtime.h>

#include "bind.h"
#include "functions.h"
#include "types.h"

// The CUDA headers spell these with plain words that names.h turns into macros (`device`).
#undef __device__
#define __device__ __attribute__((__device__))
#undef __constant__
#define __constant__ __attribute__((__constant__))

#pragma nv_diag_suppress 1097  // MSL's attributes are unknown to nvcc
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wattributes"
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#endif

namespace vqkv::cuda {

/** The one argument of a __global__ function, for extern "C" ones cannot be templates. */
template <auto F>
struct Arguments {
  using S = Signature<decltype(F), metal::vec<uint, 3>>;

  void* buffers[S::n_buffers];
  typename S::Params params;
};

template <auto F, size_t... I>
__device__ __forceinline__ void call(const Arguments<F>& a, std::index_sequence<I...>) {
  F(static_cast<typename Arguments<F>::S::template Arg<I>>(a.buffers[I])..., a.params,
    metal::vec<uint, 3>(blockIdx.x, blockIdx.y, blockIdx.z), threadIdx.x, threadIdx.x & 31u,
    threadIdx.x >> 5);
}

}  // namespace vqkv::cuda

namespace metal {

#define MSL_DEVICE __device__ __forceinline__

constexpr unsigned ALL_LANES = 0xffffffffu;

// Shuffles move 32-bit words.
template <typename T, typename F>
MSL_DEVICE T by_words(T x, F shuffle) {
  if constexpr (sizeof(T) < 4) {
    uint32_t word = 0;
    memcpy(&word, &x, sizeof(T));
    word = shuffle(word);
    memcpy(&x, &word, sizeof(T));
  } else {
    static_assert(sizeof(T) % 4 == 0, "no such type in simdgroup functions");
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &x, sizeof(T));
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 4); i++)
      words[i] = shuffle(words[i]);
    memcpy(&x, words, sizeof(T));
  }
  return x;
}
template <typename T>
MSL_DEVICE T simd_shuffle(T x, ushort i) {
  return by_words(x, [=](uint32_t w) { return __shfl_sync(ALL_LANES, w, i); });
}
template <typename T>
MSL_DEVICE T simd_broadcast(T x, ushort i) {
  return simd_shuffle(x, i);
}
template <typename T>
MSL_DEVICE T simd_shuffle_xor(T x, ushort mask) {
  return by_words(x, [=](uint32_t w) { return __shfl_xor_sync(ALL_LANES, w, mask); });
}
template <typename T>
MSL_DEVICE T simd_shuffle_down(T x, ushort delta) {
  return by_words(x, [=](uint32_t w) { return __shfl_down_sync(ALL_LANES, w, delta); });
}
template <typename T>
MSL_DEVICE T simd_shuffle_up(T x, ushort delta) {
  return by_words(x, [=](uint32_t w) { return __shfl_up_sync(ALL_LANES, w, delta); });
}
template <typename T, typename Op>
MSL_DEVICE T simd_reduce(T x, Op op) {
#pragma unroll
  for (int h = 16; h >= 1; h >>= 1)
    x = op(x, simd_shuffle_xor(x, ushort(h)));
  return x;
}
template <typename T>
MSL_DEVICE T simd_sum(T x) {
  return simd_reduce(x, op_add{});
}
template <typename T>
MSL_DEVICE T simd_max(T x) {
  return simd_reduce(x, op_max{});
}
MSL_DEVICE uint simd_max(uint x) {
  return __reduce_max_sync(ALL_LANES, x);
}
template <typename T>
MSL_DEVICE T simd_min(T x) {
  return simd_reduce(x, op_min{});
}
MSL_DEVICE simd_vote simd_ballot(bool b) {
  return simd_vote(__ballot_sync(ALL_LANES, b));
}
MSL_DEVICE bool simd_any(bool b) {
  return __any_sync(ALL_LANES, b);
}
MSL_DEVICE bool simd_all(bool b) {
  return __all_sync(ALL_LANES, b);
}
MSL_DEVICE void threadgroup_barrier(mem_flags) {
  __syncthreads();
}
MSL_DEVICE void simdgroup_barrier(mem_flags) {
  __syncwarp();
}

MSL_DEVICE vec<half, 2> operator*(vec<half, 2> a, vec<half, 2> b) {
  uint32_t word;
  asm("mul.rn.f16x2 %0, %1, %2;"
      : "=r"(word)
      : "r"(bit_cast<uint32_t>(a)), "r"(bit_cast<uint32_t>(b)));
  return bit_cast<vec<half, 2>>(word);
}
MSL_DEVICE vec<half, 2> fma(vec<half, 2> a, vec<half, 2> b, vec<half, 2> c) {
  uint32_t word;
  asm("fma.rn.f16x2 %0, %1, %2, %3;"
      : "=r"(word)
      : "r"(bit_cast<uint32_t>(a)), "r"(bit_cast<uint32_t>(b)), "r"(bit_cast<uint32_t>(c)));
  return bit_cast<vec<half, 2>>(word);
}

MSL_DEVICE uint matrix_row(uint lane) {
  return lane >> 2;
}
MSL_DEVICE uint matrix_column(uint lane) {
  return (lane & 3u) << 1;
}
MSL_DEVICE uint matrix_lane(uint row, uint column) {
  return row << 2 | column >> 1;
}
template <typename Pair>
MSL_DEVICE Pair matrix_right(Pair b) {
  uint32_t word = bit_cast<uint32_t>(b);
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
  return bit_cast<Pair>(word);
}
template <typename Pair>
MSL_DEVICE Pair matrix_right_transposed(Pair b, uint) {
  return b;
}
template <typename T>
MSL_DEVICE void matrix_right_paired(vec<T, 2>* b, float x, uint lane) {
  uint32_t word = bit_cast<uint32_t>(vec<T, 2>(T(x), T(x)));
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
  const bool odd = (lane & 4u) != 0;
  b[0] = bit_cast<vec<T, 2>>(__byte_perm(word, 0, odd ? 0x1044 : 0x4410));
  b[1] = bit_cast<vec<T, 2>>(__byte_perm(word, 0, odd ? 0x3244 : 0x4432));
}
MSL_DEVICE float matrix_from_row(float x, uint row, uint lane) {
  return __shfl_sync(ALL_LANES, x, row << 2 | (lane & 3u));
}
#define MSL_MMA_TEXT(TYPE)                               \
  "mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE \
  ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#define MSL_MMA_INPUTS                                                                         \
  "r"(bit_cast<uint32_t>(a[0])), "r"(bit_cast<uint32_t>(a[2])), "r"(bit_cast<uint32_t>(a[1])), \
      "r"(bit_cast<uint32_t>(a[3])), "r"(bit_cast<uint32_t>(b[0])), "r"(bit_cast<uint32_t>(b[1]))
#define MSL_MMA(T, TYPE)                                                                          \
  MSL_DEVICE void matrix_multiply_add(vec<float, 2>* c, const vec<T, 2>* a, const vec<T, 2>* b) { \
    asm(MSL_MMA_TEXT(TYPE) "{%0, %1, %2, %3};"                                                    \
        : "+f"(c[0].x), "+f"(c[0].y), "+f"(c[1].x), "+f"(c[1].y)                                  \
        : MSL_MMA_INPUTS);                                                                        \
  }                                                                                               \
  MSL_DEVICE void quad_multiply(vec<float, 2>* c, const vec<T, 2>* a, const vec<T, 2>* b) {       \
    asm(MSL_MMA_TEXT(TYPE) "{%10, %10, %10, %10};"                                                \
        : "=f"(c[0].x), "=f"(c[0].y), "=f"(c[1].x), "=f"(c[1].y)                                  \
        : MSL_MMA_INPUTS, "f"(0.0f));                                                             \
  }                                                                                               \
  MSL_DEVICE void quad_multiply_add(vec<float, 2>* c, const vec<T, 2>* a, const vec<T, 2>* b) {   \
    matrix_multiply_add(c, a, b);                                                                 \
  }
MSL_MMA(half, "f16")
MSL_MMA(bfloat, "bf16")
#undef MSL_MMA
#undef MSL_MMA_INPUTS
#undef MSL_MMA_TEXT
#define QUAD_MATRICES 1
// every lane its own bank
#define threadgroups_in_grid(n) int(gridDim.x)
#define TABLE_ROW_BYTES 256
MSL_DEVICE uint table_row(uint word, int i, uint at) {
  return __byte_perm(word, at, 0x5504u | i << 4);
}
MSL_DEVICE uint word_at(uint low, uint high, uint bit) {
  return __funnelshift_r(low, high, bit);
}
MSL_DEVICE float matrix_sum_rows(float x) {
#pragma unroll
  for (int h = 4; h <= 16; h *= 2)
    x += simd_shuffle_xor(x, ushort(h));
  return x;
}
MSL_DEVICE float matrix_max_rows(float x) {
#pragma unroll
  for (int h = 4; h <= 16; h *= 2)
    x = metal::max(x, simd_shuffle_xor(x, ushort(h)));
  return x;
}
MSL_DEVICE float matrix_sum_columns(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(2));
}
MSL_DEVICE float matrix_max_columns(float x) {
  x = metal::max(x, simd_shuffle_xor(x, ushort(1)));
  return metal::max(x, simd_shuffle_xor(x, ushort(2)));
}

}  // namespace metal

#include "cuda_tiles.h"
#undef MSL_DEVICE

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

#define kernel __device__ __forceinline__
#define METAL_FUNC __device__ __forceinline__
#define threadgroup_array(T, name, ...) __shared__ T name[__VA_ARGS__]
// More than the 48 KiB that a kernel may have of its own accord: the host asks for it.
#define threadgroup_bytes(name, n)                                   \
  extern __shared__ __align__(1024) uint4 vqkv_threadgroup_memory[]; \
  uchar* name = reinterpret_cast<uchar*>(vqkv_threadgroup_memory)
#define threadgroup_tables(name) threadgroup_bytes(name, 256 * TABLE_ROW_BYTES)
#define program_constant(T, name, ...) static __device__ constexpr T name[__VA_ARGS__]

#define UNROLL _Pragma("unroll")

// Found by cuModuleGetFunction under the kernel's name with this prefix.
#define MSL_GLOBAL(name, bounds, func, ...)                                       \
  extern "C" __global__ void bounds vqkv_##name(                                  \
      const __grid_constant__ vqkv::cuda::Arguments<&func<__VA_ARGS__>> a) {      \
    vqkv::cuda::call(a, vqkv::cuda::Arguments<&func<__VA_ARGS__>>::S::Buffers{}); \
  }
#define instantiate_kernel(name, func, ...) MSL_GLOBAL(name, , func, __VA_ARGS__)
#define instantiate_kernel_groups(name, threads, groups, func, ...) \
  MSL_GLOBAL(name, __launch_bounds__(threads, groups), func, __VA_ARGS__)

#include "names.h"

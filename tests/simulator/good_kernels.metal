// Correct kernels that use most of what the prelude offers, for the simulator and for nvcc.
#include "../../metal/prelude.h"

struct GoodParams {
  uint n;
  float scale;
};

#define BUILTINS                                                                         \
  uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]

program_constant(float, GOOD_TABLE, 4) = {0.5f, 1.0f, 2.0f, 4.0f};

// Sum of each block of up to 256 values, times scale: simdgroup sums, then one over simdgroups.
template <typename T, int THREADS>
kernel void good_sum(device const T* x [[buffer(0)]], device T* out [[buffer(1)]],
                     constant GoodParams& p [[buffer(2)]], BUILTINS) {
  constexpr int SIMDS = (THREADS + 31) / 32;
  threadgroup_array(float, part, SIMDS);
  const uint i = tgid.x * THREADS + tid;
  float v = simd_sum(i < p.n ? float(x[i]) : 0.0f);
  if (lane == 0)
    part[sg] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg == 0) {
    v = simd_sum(lane < SIMDS ? part[lane < SIMDS ? lane : 0] : 0.0f);
    if (lane == 0)
      out[tgid.x] = T(v * p.scale);
  }
}

// Reverses each block of THREADS values through threadgroup memory.
template <typename T, int THREADS>
kernel void good_reverse(device const T* x [[buffer(0)]], device T* out [[buffer(1)]],
                         constant GoodParams& p [[buffer(2)]], BUILTINS) {
  threadgroup_array(T, values, THREADS);
  const uint first = tgid.x * THREADS;
  if (first + tid < p.n)
    values[tid] = x[first + tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint m = metal::min(uint(THREADS), p.n - first);
  if (tid < m)
    out[first + tid] = values[m - 1 - tid];
}

// One simdgroup; row k of `out` is what function k gives each lane.
template <typename T>
kernel void good_simd(device const T* x [[buffer(0)]], device T* out [[buffer(1)]],
                      constant GoodParams& p [[buffer(2)]], BUILTINS) {
  const T v = x[lane];
  out[0 * 32 + lane] = simd_sum(v);
  out[1 * 32 + lane] = simd_max(v);
  out[2 * 32 + lane] = simd_min(v);
  out[3 * 32 + lane] = simd_shuffle(v, ushort(31 - lane));
  out[4 * 32 + lane] = simd_shuffle_xor(v, 5);
  const T up = simd_shuffle_up(v, 1), down = simd_shuffle_down(v, 1);
  out[5 * 32 + lane] = lane > 0 ? up : v;
  out[6 * 32 + lane] = lane < 31 ? down : v;
  out[7 * 32 + lane] = simd_broadcast(v, 3);
  simdgroup_barrier(mem_flags::mem_none);
  const bool odd = (lane & 1) != 0;
  const uint votes = uint(simd_vote::vote_t(simd_ballot(odd)));
  out[8 * 32 + lane] =
      T(metal::popcount(votes) + (simd_any(odd) ? 100 : 0) + (simd_all(odd) ? 1000 : 0));
}

// Scalar functions of one float; row k of `out` is function k.
template <int UNUSED>
kernel void good_math(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                      constant GoodParams& p [[buffer(2)]], BUILTINS) {
  const uint i = tgid.x * 64 + tid;
  if (i >= p.n)
    return;
  const float v = x[i];
  const float r[20] = {
      metal::exp(v),
      metal::exp2(v),
      metal::log(v),
      metal::log2(v),
      metal::sqrt(v),
      metal::rsqrt(v),
      metal::floor(v),
      metal::ceil(v),
      metal::rint(v),
      metal::round(v),
      metal::abs(v),
      metal::fma(v, v, p.scale),
      metal::min(v, NAN),
      metal::max(v, 1.5f),
      metal::clamp(v, -1.0f, 1.0f),
      metal::select(v, -v, v > 2.0f),
      metal::isnan(v) ? 1.0f : 0.0f,
      metal::isfinite(v) ? 1.0f : 0.0f,
      float(metal::clz(as_type<uint>(v))),
      GOOD_TABLE[i % 4],
  };
  for (uint k = 0; k < 20; k++)
    out[k * p.n + i] = r[k];
}

// Conversions and vectors; one thread for 4 values.
template <typename T>
kernel void good_vectors(device const T* x [[buffer(0)]], device const char4* q [[buffer(1)]],
                         device T* out [[buffer(2)]], device float4* wide [[buffer(3)]],
                         constant GoodParams& p [[buffer(4)]], BUILTINS) {
  const uint i = tgid.x * 64 + tid;
  if (i >= p.n)
    return;
  const float4 v =
      float4(float(x[i * 4]), float(x[i * 4 + 1]), float(x[i * 4 + 2]), float(x[i * 4 + 3]));
  const float4 w = float4(q[i]);
  float4 s = v * w + p.scale;
  s.x += metal::dot(v, w);
  s = metal::max(s, float4(-FLT_MAX));
  const uint2 bits = as_type<uint2>(s.zw);
  const ulong both = ulong(bits.x) | (ulong(bits.y) << 32);
  s.z = as_type<float>(uint(metal::min(both, ulong(-1)) & 0xffffffffu));
  for (int k = 0; k < 4; k++)
    out[i * 4 + uint(k)] = T(s[k]);
  wide[i] = s;
}

// Writes the lower half only, so that the rest of the output keeps its bytes.
template <int UNUSED>
kernel void good_partial(device const float* unread [[buffer(0)]], device int* out [[buffer(1)]],
                         constant GoodParams& p [[buffer(2)]], BUILTINS) {
  const uint i = tgid.z * p.n + tgid.y;
  if (tid == 0)
    out[i] = int(i);
}

#define GOOD(tname, T)                                          \
  instantiate_kernel(good_sum_##tname##_256, good_sum, T, 256)  \
  instantiate_kernel(good_sum_##tname##_40, good_sum, T, 40)    \
  instantiate_kernel(good_reverse_##tname, good_reverse, T, 96) \
  instantiate_kernel(good_vectors_##tname, good_vectors, T)
GOOD(float32, float)
GOOD(float16, half)
GOOD(bfloat16, bfloat)
instantiate_kernel(good_simd_float32, good_simd, float)
instantiate_kernel(good_simd_float16, good_simd, half)
instantiate_kernel(good_simd_int32, good_simd, int)
instantiate_kernel(good_simd_uint8, good_simd, uchar)
instantiate_kernel(good_math, good_math, 0)
instantiate_kernel(good_partial, good_partial, 0)

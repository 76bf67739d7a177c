// Randomized Hadamard transform of rows. Host side: csrc/hadamard/launch.cpp.
//
// LANES lanes hold a row, and a lane KEPT = 32 / LANES neighbours of every 32 channels: value
// r KEPT + k of a lane is channel 32 r + KEPT (lane % LANES) + k. D = N M channels, N a power of
// two and M the order of a stored matrix: channel N j + t is entry j of M and t of N. Sums have a
// fixed order, that of csrc/hadamard/cpu_kernel.h: over r, then over the channels of equal r by
// halves.
#pragma once

#include "hadamard_matrix.h"
#include "params.h"
#include "prelude.h"

#define HADAMARD_SIMDGROUPS 8

// x[i] of the given dtype, a HADAMARD_FLOAT and so on. The dtype is no template argument since it
// would triple the number of kernels for one uniform branch.
METAL_FUNC float hadamard_load(device const uchar* x, long i, int dtype) {
  if (dtype == HADAMARD_FLOAT)
    return ((device const float*)x)[i];
  if (dtype == HADAMARD_HALF)
    return float(((device const half*)x)[i]);
  return float(((device const bfloat*)x)[i]);
}

METAL_FUNC void hadamard_store(device uchar* out, long i, int dtype, float v) {
  if (dtype == HADAMARD_FLOAT)
    ((device float*)out)[i] = v;
  else if (dtype == HADAMARD_HALF)
    ((device half*)out)[i] = half(v);
  else
    ((device bfloat*)out)[i] = bfloat(v);
}

// sqrt(D) scale v H, or its transpose; values beyond channel D are 0.
template <int D, int M, int LANES = 32>
METAL_FUNC void hadamard_transform(thread float* v, uint lane, bool transposed, float scale) {
  constexpr int N = D / M, E = (D + 31) / 32, KEPT = 32 / LANES;
  constexpr int NR = N >= 32 ? N / 32 : 1;  // registers per entry of M
  UNROLL
  for (int h = 1; h < KEPT; h *= 2) {
    UNROLL
    for (int i = 0; i < E * KEPT; i++) {
      if ((i & h) == 0) {
        const float a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
    }
  }
  UNROLL
  for (int h = KEPT; h < N && h < 32; h *= 2) {
    const float sign = (lane & uint(h / KEPT)) != 0 ? -1.0f : 1.0f;
    UNROLL
    for (int i = 0; i < E * KEPT; i++)
      v[i] = metal::fma(sign, v[i], metal::simd_shuffle_xor(v[i], ushort(h / KEPT)));
  }
  UNROLL
  for (int h = 1; h < NR; h *= 2) {
    UNROLL
    for (int i = 0; i < E * KEPT; i++) {
      if ((i / KEPT & h) == 0) {
        const float a = v[i], b = v[i + h * KEPT];
        v[i] = a + b;
        v[i + h * KEPT] = a - b;
      }
    }
  }
  if (M > 1) {  // LANES is 32
    float sum[E];
    UNROLL
    for (int r = 0; r < E; r++)
      sum[r] = -0.0f;  // adds nothing to either zero
    UNROLL
    for (int j = 0; j < M; j++) {
      float x = 0.0f;
      if (N < 32)
        x = metal::simd_shuffle(v[N < 32 ? j * N / 32 : 0], ushort(j * N % 32 + int(lane) % N));
      UNROLL
      for (int r = 0; r < E; r++) {
        if (N >= 32)
          x = v[N >= 32 ? j * NR + r % NR : 0];
        const int i = N < 32 ? (32 * r + int(lane)) / N : r / NR;
        const uint bits = transposed ? hadamard_matrix_row(M, j) >> metal::min(i, 31)
                                     : hadamard_matrix_row(M, i) >> j;
        sum[r] += (bits & 1) != 0 ? x : -x;
      }
    }
    UNROLL
    for (int r = 0; r < E; r++)
      v[r] = sum[r];
  }
  UNROLL
  for (int i = 0; i < E * KEPT; i++)
    v[i] = D % 32 == 0 || 32 * i + int(lane) < D ? v[i] * scale : 0.0f;
}

// One simdgroup per row. signs: [heads, D].
template <int D, int M>
kernel void hadamard(device const uchar* x [[buffer(0)]], device const float* signs [[buffer(1)]],
                     device uchar* out [[buffer(2)]], constant HadamardParams& p [[buffer(3)]],
                     uint3 tgid [[threadgroup_position_in_grid]],
                     uint tid [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int E = (D + 31) / 32;
  const long row = long(tgid.x) * HADAMARD_SIMDGROUPS + sg;
  if (row >= p.rows)
    return;
  device const float* sign = signs + row / p.seq % p.heads * D;
  float v[E];
  for (int r = 0; r < E; r++) {
    const int c = 32 * r + int(lane);
    v[r] = c < D ? hadamard_load(x, row * D + c, p.dtype) : 0.0f;
    if (!p.inverse && c < D)
      v[r] *= sign[c];
  }
  hadamard_transform<D, M>(v, lane, p.inverse != 0, p.scale);
  for (int r = 0; r < E; r++) {
    const int c = 32 * r + int(lane);
    if (c < D)
      hadamard_store(out, row * D + c, p.out_dtype, p.inverse ? v[r] * sign[c] : v[r]);
  }
}

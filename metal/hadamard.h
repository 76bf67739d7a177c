// Randomized Hadamard transform of rows, and scalar quantisation of the result. Host side:
// csrc/hadamard/launch.cpp.
//
// A simdgroup holds a row: register r of a lane is channel 32 r + lane. D = N M channels, N a power
// of two and M the order of a stored matrix: channel N j + t is entry j of M and t of N. Sums have
// a fixed order, that of csrc/hadamard/cpu_kernel.h: over the registers, then over the lanes.
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

// v H times scale, or its transpose; v has ceil(D / 32) values, 0 beyond channel D.
template <int D, int M>
METAL_FUNC void hadamard_transform(thread float* v, uint lane, bool transposed, float scale) {
  constexpr int N = D / M, E = (D + 31) / 32;
  constexpr int NR = N >= 32 ? N / 32 : 1;  // registers per entry of M
  UNROLL
  for (int h = 1; h < N && h < 32; h *= 2) {
    const bool upper = (lane & uint(h)) != 0;
    UNROLL
    for (int r = 0; r < E; r++) {
      const float other = metal::simd_shuffle_xor(v[r], ushort(h));
      v[r] = upper ? other - v[r] : v[r] + other;
    }
  }
  UNROLL
  for (int h = 1; h < NR; h *= 2) {
    UNROLL
    for (int r = 0; r < E; r++) {
      if ((r & h) == 0) {
        const float a = v[r], b = v[r + h];
        v[r] = a + b;
        v[r + h] = a - b;
      }
    }
  }
  if (M > 1) {
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
  for (int r = 0; r < E; r++)
    v[r] = 32 * r + int(lane) < D ? v[r] * scale : 0.0f;
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

// hadamard(x, signs) of one row.
template <int D, int M>
METAL_FUNC void hadamard_forward(thread float* v, device const uchar* x, device const float* signs,
                                 long row, uint lane, constant HadamardQuantizeParams& p) {
  device const float* sign = signs + row / p.seq % p.heads * D;
  for (int r = 0; r < (D + 31) / 32; r++) {
    const int c = 32 * r + int(lane);
    v[r] = c < D ? hadamard_load(x, row * D + c, p.dtype) * sign[c] : 0.0f;
  }
  hadamard_transform<D, M>(v, lane, false, p.scale);
}

// The factor of the levels, from |v|^2, <v, levels> and |levels|^2. Rows that are not finite decode
// to NaN; a row of zeros, or one whose levels say nothing about it, decodes to zeros.
METAL_FUNC float hadamard_row_scale(int kind, float norm2, float dot, float square, float root) {
  if (!metal::isfinite(norm2))
    return NAN;
  float over = norm2, under = dot;  // HADAMARD_UNBIASED
  if (kind == HADAMARD_MSE) {
    over = dot;
    under = square;
  } else if (kind == HADAMARD_NORM) {
    over = metal::sqrt(norm2);
    under = root;
  } else if (kind == HADAMARD_MATCHED) {
    over = metal::sqrt(norm2);
    under = metal::sqrt(square);
  }
  return norm2 > 0.0f && under > 0.0f ? over / under : 0.0f;
}

// Codes and scale of the row v. table: bounds between levels at 0, levels at 256.
template <int D>
METAL_FUNC void hadamard_encode(thread const float* v, threadgroup const float* table,
                                device uchar* packed, device bfloat* scales, long row, uint lane,
                                constant HadamardQuantizeParams& p) {
  constexpr int E = (D + 31) / 32;
  float part = 0.0f;
  for (int r = 0; r < E; r++) {
    const float product = v[r] * v[r];
    part += product;
  }
  const float norm2 = metal::simd_sum(part);
  float factor = norm2 > 0.0f ? p.root / metal::sqrt(norm2) : 0.0f;
  if (!metal::isfinite(norm2))
    factor = NAN;  // above no bound

  device uchar* bytes = packed + row * p.bytes;
  float dot = 0.0f, square = 0.0f;
  for (int r = 0; r < E; r++) {
    const int c = 32 * r + int(lane);
    const float u = v[r] * factor;
    uint index = 0;
    for (int step = (1 << p.bits) / 2; step > 0; step /= 2)
      index += table[int(index) + step - 1] < u ? uint(step) : 0u;
    index = c < D ? index : 0u;
    const float level = c < D ? table[256 + index] : 0.0f;
    const float product = v[r] * level, level2 = level * level;
    dot += product;
    square += level2;
    if (p.bits == 8) {
      if (c < D)
        bytes[c] = uchar(index);
    } else {
      // eight lanes make `bits` whole bytes
      uint word = index << (uint(p.bits) * (lane % 8));
      word |= metal::simd_shuffle_xor(word, ushort(1));
      word |= metal::simd_shuffle_xor(word, ushort(2));
      word |= metal::simd_shuffle_xor(word, ushort(4));
      const int at = (4 * r + int(lane) / 8) * p.bits + int(lane) % 8;
      if (int(lane) % 8 < p.bits && at < p.bytes)
        bytes[at] = uchar((word >> (8 * (lane % 8))) & 0xff);
    }
  }
  dot = metal::simd_sum(dot);
  square = metal::simd_sum(square);
  if (lane == 0)
    scales[row] = bfloat(hadamard_row_scale(p.kind, norm2, dot, square, p.root));
}

METAL_FUNC void hadamard_table(threadgroup float* table, device const float* centroids, uint tid,
                               int levels) {
  if (int(tid) < levels) {
    table[256 + tid] = centroids[tid];
    if (int(tid) + 1 < levels)
      table[tid] = 0.5f * (centroids[tid] + centroids[tid + 1]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// One simdgroup per row. With p.frozen every sequence has a centre [D] and its unit.
template <int D, int M>
kernel void hadamard_quantize(
    device const uchar* x [[buffer(0)]], device const float* signs [[buffer(1)]],
    device const float* centroids [[buffer(2)]], device const char* centres [[buffer(3)]],
    device const bfloat* centre_scales [[buffer(4)]], device uchar* packed [[buffer(5)]],
    device bfloat* scales [[buffer(6)]], constant HadamardQuantizeParams& p [[buffer(7)]],
    uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup_array(float, table, 512);
  hadamard_table(table, centroids, tid, 1 << p.bits);
  const long row = long(tgid.x) * HADAMARD_SIMDGROUPS + sg;
  if (row >= p.rows)
    return;
  float v[(D + 31) / 32];
  hadamard_forward<D, M>(v, x, signs, row, lane, p);
  if (p.frozen) {
    const long at = row / p.seq;
    const float unit = float(centre_scales[at]);
    for (int r = 0; r < (D + 31) / 32; r++) {
      const int c = 32 * r + int(lane);
      if (c < D)
        v[r] -= float(centres[at * D + c]) * unit;
    }
  }
  hadamard_encode<D>(v, table, packed, scales, row, lane, p);
}

// One threadgroup per block of p.block rows, whose mean is subtracted. A token is transformed twice
// rather than kept: reading it again is cheap.
template <int D, int M>
kernel void hadamard_quantize_blocks(
    device const uchar* x [[buffer(0)]], device const float* signs [[buffer(1)]],
    device const float* centroids [[buffer(2)]], device uchar* packed [[buffer(3)]],
    device bfloat* scales [[buffer(4)]], device char* centres [[buffer(5)]],
    device bfloat* centre_scales [[buffer(6)]], constant HadamardQuantizeParams& p [[buffer(7)]],
    uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int E = (D + 31) / 32;
  threadgroup_array(float, table, 512);
  threadgroup_array(float, shared, HADAMARD_SIMDGROUPS / 2 * 32 * E);
  hadamard_table(table, centroids, tid, 1 << p.bits);
  const long first = long(tgid.x) * p.block;

  // Tokens t, t + 16, ... are summed in order, then the 16 sums by halves.
  float v[E], low[E], high[E];
  for (int r = 0; r < E; r++)
    low[r] = high[r] = 0.0f;
  for (int t = int(sg); t < p.block; t += HADAMARD_SIMDGROUPS) {
    hadamard_forward<D, M>(v, x, signs, first + t, lane, p);
    for (int r = 0; r < E; r++) {
      if (t % 16 < 8)
        low[r] += v[r];
      else
        high[r] += v[r];
    }
  }
  for (int r = 0; r < E; r++)
    low[r] += high[r];
  for (int h = HADAMARD_SIMDGROUPS / 2; h > 0; h /= 2) {
    if (int(sg) >= h && int(sg) < 2 * h) {
      for (int r = 0; r < E; r++)
        shared[((int(sg) - h) * E + r) * 32 + int(lane)] = low[r];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(sg) < h) {
      for (int r = 0; r < E; r++)
        low[r] += shared[(int(sg) * E + r) * 32 + int(lane)];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (sg == 0) {
    float most = 0.0f;
    for (int r = 0; r < E; r++) {
      low[r] *= p.share;
      low[r] = metal::isfinite(low[r]) ? low[r] : 0.0f;
      most = metal::max(most, metal::abs(low[r]));
    }
    const bfloat stored = bfloat(metal::simd_max(most) / 127.0f);
    const float unit = float(stored);
    for (int r = 0; r < E; r++) {
      const int c = 32 * r + int(lane);
      const float steps = unit > 0.0f ? metal::rint(low[r] / unit) : 0.0f;
      const float q = metal::clamp(steps, -127.0f, 127.0f);
      shared[c] = q * unit;
      if (c < D)
        centres[long(tgid.x) * D + c] = char(int(q));
    }
    if (lane == 0)
      centre_scales[tgid.x] = stored;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int r = 0; r < E; r++)
    low[r] = shared[32 * r + int(lane)];
  for (int t = int(sg); t < p.block; t += HADAMARD_SIMDGROUPS) {
    hadamard_forward<D, M>(v, x, signs, first + t, lane, p);
    for (int r = 0; r < E; r++)
      v[r] -= low[r];
    hadamard_encode<D>(v, table, packed, scales, first + t, lane, p);
  }
}

// quantize_vq by products of matrices, where the prelude says that these are fast (QUAD_MATRICES),
// for codebooks of up to 256 rows. Host side: csrc/vq/launch.cpp.
//
// A score, half a squared distance, is |x|^2 / 2 + |c|^2 / 2 - <x, c>. A product of 16-bit matrices
// has 16 terms. With numbers as sums of two of 16 bits, x = x1 + x2 and c = c1 + c2, four
// dimensions take 12 of them, -x1 c1 - x2 c1 - x1 c2, and |c|^2 / 2 in three parts, times 1, as
// many as are left: about what float32 gives. |x|^2 / 2, equal for all rows, is left out. Scores
// say which groups of rows may hold the nearest; distances to the rows of these decide.
#pragma once

#include "vq.h"

#if QUAD_MATRICES

#define VQ_QUAD_ROWS 256
#define VQ_QUAD_PARTS 8    // groups of rows of a lane
#define VQ_QUAD_STRIDE 40  // floats of a dimension of a simdgroup's vectors: spreads banks
#define VQ_QUAD_STEPS(D) (((D) + 3) / 4)
// Vectors longer than so many of the units in which codebook values are below 16 are compared with
// all rows; nothing overflows before.
#define VQ_QUAD_LONGEST 2048.0f
// Scores, half distances and what they are made of are off by less than 3.8e-6 (|x|^2 + |c|^2).
#define VQ_QUAD_MARGIN 7.6e-6f

METAL_FUNC half2 vq_halves(float x) {
  const half high = half(x);
  return half2(high, half(x - float(high)));
}

// Column `column` of a pair of right matrices: lane q of its four has dimensions q, q + 4, ... of a
// row and a part of half its norm. The score of a row that there is not is infinite.
template <int D>
METAL_FUNC void vq_quad_column(threadgroup uint2* right, threadgroup const float* row, bool there,
                               float unit, float half_norm) {
  const half2 most = vq_halves(there ? half_norm : 0.0f);
  const half rest = half(half_norm - float(most.x) - float(most.y)), zero = half(0.0f);
  const half norm[4] = {there ? most.x : half(INFINITY), most.y, there ? rest : zero, zero};
  UNROLL
  for (int i = 0; i < VQ_QUAD_STEPS(D); i++) {
    UNROLL
    for (int q = 0; q < 4; q++) {
      const int d = 4 * i + q;
      const half2 c = vq_halves(there && d < D ? -row[d < D ? d : 0] * unit : 0.0f);
      right[32 * i + q] =
          uint2(as_type<uint>(half2(c.x, c.x)), as_type<uint>(half2(c.y, i == 0 ? norm[q] : zero)));
    }
  }
}

// Each lane has a vector; the four of neighbouring lanes are rows of the same lanes' matrices.
template <int D>
METAL_FUNC void vq_quad_lefts(thread half2* left, threadgroup float* stage, thread const float* x,
                              uint lane) {
  constexpr int STEPS = VQ_QUAD_STEPS(D);
  const int q = int(lane % 4);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int d = 0; d < D; d++)
    stage[d * VQ_QUAD_STRIDE + int(lane)] = x[d];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int i = 0; i < STEPS; i++) {
    const int d = 4 * i + q;
    const float4 four = *(threadgroup const float4*)(stage + (d < D ? d : 0) * VQ_QUAD_STRIDE +
                                                     4 * (int(lane) / 4));
    const float each[4] = {four.x, four.y, four.z, four.w};
    UNROLL
    for (int r = 0; r < 4; r++) {
      const half2 parts = vq_halves(d < D ? each[r] : 0.0f);
      thread half2* to = left + r / 2 * (4 * STEPS) + 4 * i + r % 2 * 2;
      to[0] = parts;
      to[1] = half2(parts.x, half(1.0f));
    }
  }
}

// The least of what four lanes have for the vector of each.
METAL_FUNC float vq_quad_least(thread const float* least, uint lane) {
  const bool upper = (lane & 2) != 0, odd = (lane & 1) != 0;
  const float a = least[0], b = least[1], c = least[2], d = least[3];
  const float even = metal::min(upper ? c : a, metal::simd_shuffle_xor(upper ? a : c, ushort(2)));
  const float other = metal::min(upper ? d : b, metal::simd_shuffle_xor(upper ? b : d, ushort(2)));
  return metal::min(odd ? other : even, metal::simd_shuffle_xor(odd ? even : other, ushort(1)));
}

// Which groups of rows have scores within a margin of a vector's least. Bit 8 q + c is that of
// group c of neighbouring lane q. FULL: there are all parts.
template <int D, bool FULL>
METAL_FUNC uint vq_quad_groups(thread const half2* left, threadgroup const uint2* rights,
                               float margin, int parts, uint lane) {
  constexpr int STEPS = VQ_QUAD_STEPS(D);
  const uint quad = lane & ~3u;
  float low[4][VQ_QUAD_PARTS], least[4];
  UNROLL
  for (int c = 0; c < VQ_QUAD_PARTS; c++) {
    if (FULL || c < parts) {
      UNROLL
      for (int j = 0; j < VQ_GROUP / 2; j++) {
        half2 right[2 * STEPS];
        UNROLL
        for (int i = 0; i < STEPS; i++) {
          const uint2 words = rights[((c * (VQ_GROUP / 2) + j) * STEPS + i) * 32 + int(lane)];
          right[2 * i] = as_type<half2>(words.x);
          right[2 * i + 1] = as_type<half2>(words.y);
        }
        UNROLL
        for (int m = 0; m < 2; m++) {
          float2 score[2];
          quad_multiply(score, left + m * (4 * STEPS), right);
          if (STEPS > 1)
            quad_multiply_add(score, left + m * (4 * STEPS) + 4 * (STEPS - 1),
                              right + 2 * (STEPS - 1));
          UNROLL
          for (int h = 0; h < 2; h++) {
            const float two = metal::min(score[h].x, score[h].y);
            low[2 * m + h][c] = j == 0 ? two : metal::min(low[2 * m + h][c], two);
          }
        }
      }
    } else {
      UNROLL
      for (int r = 0; r < 4; r++)
        low[r][c] = INFINITY;
    }
  }
  UNROLL
  for (int r = 0; r < 4; r++) {
    least[r] = low[r][0];
    UNROLL
    for (int c = 1; c < VQ_QUAD_PARTS; c++)
      least[r] = metal::min(least[r], low[r][c]);
  }
  const float limit = vq_quad_least(least, lane) + margin;
  uint beyond = 0;  // bit 8 r + c: group c is not near to vector r
  UNROLL
  for (int r = 3; r >= 0; r--) {
    const float limit_r = metal::simd_shuffle(limit, ushort(quad + r));
    UNROLL
    for (int c = VQ_QUAD_PARTS - 1; c >= 0; c--)
      beyond = beyond << 1 | as_type<uint>(limit_r - low[r][c]) >> 31;
  }
  uint groups = 0;
  UNROLL
  for (int q = 0; q < 4; q++) {
    const uint other = metal::simd_shuffle(~beyond, ushort(quad + q));
    groups |= (other >> (8 * (lane % 4)) & 255) << (8 * q);
  }
  return groups;
}

// Threadgroups take runs of VQ_THREADS vectors of one codebook (grid.y) in turns.
template <typename T, typename C, int D>
kernel void quantize_vq_quads(device const T* x [[buffer(0)]],
                              device const float* codebook [[buffer(1)]],
                              device C* codes [[buffer(2)]], constant VqParams& p [[buffer(3)]],
                              uint3 tgid [[threadgroup_position_in_grid]],
                              uint tid [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int STEPS = VQ_QUAD_STEPS(D), SIMDS = VQ_THREADS / 32;
  threadgroup_array(float4, rows, VQ_QUAD_ROWS * D / 4);
  threadgroup_array(uint2, rights, VQ_QUAD_ROWS / 8 * 32 * STEPS);
  threadgroup_array(float4, stages, SIMDS * D * VQ_QUAD_STRIDE / 4);
  threadgroup_array(float, largest, 2 * SIMDS);
  threadgroup float* values = (threadgroup float*)rows;
  const int book_groups = p.per_group ? p.groups : 1;
  const long head = long(tgid.y) / book_groups, group = long(tgid.y) % book_groups;
  const long n = p.outer * (p.per_head ? 1 : p.heads) * p.seq * (p.per_group ? 1 : p.groups);
  const int parts = (p.rows + 31) / 32, padded = 32 * parts;

  device const float* book = codebook + long(tgid.y) * p.rows * D;
  float most = 0.0f;
  for (int i = int(tid); i < padded * D; i += VQ_THREADS) {
    values[i] = i < p.rows * D ? book[i] : INFINITY;
    most = metal::max(most, i < p.rows * D ? metal::abs(values[i]) : 0.0f);
  }
  most = metal::simd_max(most);
  if (lane == 0)
    largest[sg] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int i = 0; i < SIMDS; i++)
    most = metal::max(most, largest[i]);
  // of the exponent: the largest value is to be at least 8 and below 16
  const bool ordinary = most > 1.0e-30f && most < 1.0e30f;
  const float unit =
      ordinary ? as_type<float>((257u << 23) - (as_type<uint>(most) & 0x7f800000u)) : 1.0f;
  float half_norms = 0.0f;
  for (int i = int(tid); i < padded; i += VQ_THREADS) {
    // a column of the matrices of part c, pair of columns j
    const int column = i % 8, j = i / 8 % (VQ_GROUP / 2), c = i / 8 / (VQ_GROUP / 2);
    const int row = VQ_GROUP * (column / 2 * parts + c) + 2 * j + column % 2;
    float half_norm = 0.0f;
    UNROLL
    for (int d = 0; d < D; d++) {
      const float scaled = values[row * D + d] * unit;
      half_norm = metal::fma(0.5f * scaled, scaled, half_norm);
    }
    const bool there = row < p.rows && half_norm < INFINITY;  // a row with a NaN is none
    vq_quad_column<D>(rights + i / 8 * (32 * STEPS) + 4 * column, values + row * D, there, unit,
                      half_norm);
    half_norms = there ? metal::max(half_norms, half_norm) : half_norms;
  }
  half_norms = metal::simd_max(half_norms);
  if (lane == 0)
    largest[SIMDS + sg] = half_norms;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int i = 0; i < SIMDS; i++)
    half_norms = metal::max(half_norms, largest[SIMDS + i]);
  // If every row has a NaN all scores are infinite, and so is the limit: their difference is a NaN,
  // whose sign says nothing. (Rows of zeros beside such are compared one by one as well.)
  const bool told = ordinary && half_norms > 0.0f;

  const long step = long(threadgroups_in_grid(p.threadgroups)) * VQ_THREADS;
  long i = long(tgid.x) * VQ_THREADS + tid;
  // threads past the end repeat the last vector and store nothing
  long at = vq_position(p, metal::min(i, n - 1), head, group);
  float next[D];
  UNROLL
  for (int d = 0; d < D; d++)
    next[d] = float(x[at * D + d]);
  while (i - tid < n) {
    const bool live = i < n;
    const long to = at;
    float v[D], scaled[D], half_norm = 0.0f;
    UNROLL
    for (int d = 0; d < D; d++) {
      v[d] = next[d];
      scaled[d] = v[d] * unit;
      half_norm = metal::fma(0.5f * scaled[d], scaled[d], half_norm);
    }
    half2 left[8 * STEPS];
    vq_quad_lefts<D>(left, (threadgroup float*)stages + sg * (D * VQ_QUAD_STRIDE), scaled, lane);
    i += step;  // read while this one is compared
    at = vq_position(p, metal::min(i, n - 1), head, group);
    UNROLL
    for (int d = 0; d < D; d++)
      next[d] = float(x[at * D + d]);
    // the constant is for underflow of distances
    const float margin =
        metal::fma(VQ_QUAD_MARGIN, 2.0f * (half_norm + half_norms), 1.0e-36f * unit * unit);
    uint near = parts == VQ_QUAD_PARTS
                    ? vq_quad_groups<D, true>(left, rights, margin, parts, lane)
                    : vq_quad_groups<D, false>(left, rights, margin, parts, lane);
    float best = INFINITY;
    uint code = 0;
    if (told && half_norm <= 0.5f * VQ_QUAD_LONGEST * VQ_QUAD_LONGEST) {
      while (near != 0) {
        const int bit = int(metal::ctz(near));
        near &= near - 1;
        vq_search_group<D>(v, best, code, rows, VQ_GROUP * (bit / 8 * parts + bit % 8), 0, lane);
      }
    } else {
      vq_search_all<D>(v, best, code, rows, p.rows, 0);
    }
    if (live)
      codes[to] = C(code);
  }
}

#endif

// Scalar quantisation of rows of 16 bits that begin on multiples of 16 bytes, without centres; of
// HADAMARD_LANES 4. Most calls are of this kind, and with a kernel of their own no register is
// spent on what they do not need. Host side: csrc/hadamard/launch.cpp.
#pragma once

#include "hadamard_quantize.h"

#define HADAMARD_HALVES_SIMDS 4

#if QUAD_MATRICES

// With signs +-1, and levels found by cells. A row is read while that before it is coded.
template <int D, typename T>
METAL_FUNC void hadamard_quads_rows(device const uchar* x, device const float* signs,
                                    threadgroup const float* table, device uchar* packed,
                                    device bfloat* scales, uint group, uint lane, uint sg,
                                    constant HadamardQuantizeParams& p) {
  constexpr int ROWS = 8, TILE = ROWS * HADAMARD_HALVES_SIMDS;
  const int groups = threadgroups_in_grid(p.groups), step = groups * TILE, rows = int(p.rows);
  int at = int(group) * TILE + int(sg * ROWS + lane / 4);
  uint words[HADAMARD_WORDS(D)], flips[HADAMARD_FLIPS(D)], rights[8];
  hadamard_quad_words<D>(words, x, metal::min(at, rows - 1), lane, true);
  hadamard_quad_matrices<T>(rights, lane);
  UNROLL
  for (int i = 0; i < 8; i++)  // a compiler that sees how they differ copies them at every use
    rights[i] = metal::simd_shuffle(rights[i], ushort(lane));
  HadamardSums kept = {};
  int pass = 0;
  for (int left = p.tiles - int(group); left > 0; left -= groups, pass++) {
    const int row = metal::min(at, rows - 1);  // lanes past the end repeat the last
    if (pass == 0 || p.heads > 1)
      hadamard_flips<D, 1, 4>(flips, signs, row, lane, p);
    float v[D / 4];
    hadamard_by_quads<D, T>(v, words, flips, rights, 1.0f);
    const int next = at + step;
    hadamard_quad_words<D>(words, x, metal::min(next, rows - 1), lane, true);
    const HadamardSums sums =
        hadamard_encode<D, 4>(v, HADAMARD_BY_CELL, table, packed, row, at < rows, lane, p);
    hadamard_keep<4>(kept, sums, at, step, pass, left <= groups, scales, lane, p);
    at = next;
  }
}

#endif

template <int D>
kernel void hadamard_quantize_halves(
    device const uchar* x [[buffer(0)]], device const float* signs [[buffer(1)]],
    device const float* centroids [[buffer(2)]], device uchar* packed [[buffer(3)]],
    device bfloat* scales [[buffer(4)]], constant HadamardQuantizeParams& p [[buffer(5)]],
    uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup_array(float, table, HADAMARD_TABLE);
  hadamard_table<D, 32 * HADAMARD_HALVES_SIMDS>(table, centroids, tid, p.bits, p.root);
  const bool quads = hadamard_has_quads<D, 1, 4>(signs, lane, p);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#if QUAD_MATRICES
  if (quads && hadamard_search(table, p.bits) == HADAMARD_BY_CELL) {
    if (p.dtype == HADAMARD_HALF)
      hadamard_quads_rows<D, half>(x, signs, table, packed, scales, tgid.x, lane, sg, p);
    else
      hadamard_quads_rows<D, bfloat>(x, signs, table, packed, scales, tgid.x, lane, sg, p);
    return;
  }
#endif
  hadamard_quantize_rows<D, 1, 4, HADAMARD_HALVES_SIMDS>(x, signs, 0, 0, false, table, quads,
                                                         packed, scales, tgid.x, lane, sg, p);
}

// The transform of 16-bit rows by products of matrices, where the prelude says that these are fast
// (QUAD_MATRICES): signs are +-1, and four lanes hold a row as hadamard.h has it.
//
// A lane's eight neighbours of 32 channels are two groups of four, one for each value of bit 2 of
// the channel. The 16 values of such a group in four lanes are a row of the left matrix, and rows
// 8 to 15 of it are those of the next 32 channels. The right matrix is the Hadamard matrix of order
// 16, whose columns are ordered so that sums lie where their channels belong; its negative takes
// part for bit 2 as well. What is left are sums over r.
#pragma once

#include "hadamard_rows.h"

#define HADAMARD_QUADS(D, M, LANES) (QUAD_MATRICES && (M) == 1 && (D) >= 32 && (LANES) == 4)
#define HADAMARD_FLIPS(D) (((D) + 127) / 128)  // words of a lane

#if QUAD_MATRICES

// Are all signs +-1? Of all heads, so that no row's bits depend on which rows are near.
template <int D>
METAL_FUNC bool hadamard_plain_signs(device const float* signs, int heads, uint lane) {
  for (int head = 0; head < heads; head++) {
    uint other = 0;
    UNROLL
    for (int c = 0; c < D; c += 32)
      other |= (as_type<uint>(signs[long(head) * D + c + int(lane)]) ^ 0x3f800000u) << 1;
    if (!metal::simd_all(other == 0))
      return false;
  }
  return true;
}

// Two entries of a column of the right matrix, +-1 each: of bits 0 (the pair), 3 and 4 of the
// channel.
template <typename T>
METAL_FUNC uint hadamard_quad_matrix(uint lane) {
  const uint row = lane % 4, column = lane / 4;  // bits 3 and 4 | bits 0, 3 and 4
  const uint one = as_type<ushort>(T(1.0f));
  const uint sign = (metal::popcount(row & (column / 2)) & 1) << 15;
  return (one | sign) | (one | (sign ^ (column % 2) << 15)) << 16;
}

// What the lane holds of a row, in pairs.
template <int D, bool WIDE>
METAL_FUNC void hadamard_quad_words(thread uint* words, device const uchar* row, uint lane) {
  UNROLL
  for (int r = 0; r < D / 32; r++) {
    device const uchar* from = row + 64 * r + 16 * (lane % 4);
    if (WIDE) {
      hadamard_words<4>(words + 4 * r, from);
    } else {
      device const ushort* x = (device const ushort*)from;
      UNROLL
      for (int i = 0; i < 4; i++)
        words[4 * r + i] = uint(x[2 * i]) | uint(x[2 * i + 1]) << 16;
    }
  }
}

template <int D, typename T, bool WIDE>
METAL_FUNC void hadamard_by_quads(thread float* v, device const uchar* row, thread const uint* flips,
                                  uint lane, float scale) {
  typedef vec<T, 2> Pair;
  constexpr int E = D / 32;
  uint words[4 * E + 4];
  hadamard_quad_words<D, WIDE>(words, row, lane);
  UNROLL
  for (int i = 0; i < 4 * E; i++)
    words[i] ^= flips[i / 16] << (i % 16) & 0x80008000u;
  UNROLL
  for (int i = 4 * E; i < 4 * E + 4; i++)
    words[i] = 0;
  const uint plus = hadamard_quad_matrix<T>(lane), minus = plus ^ 0x80008000u;
  UNROLL
  for (int r = 0; r < E; r += 2) {
    Pair left[2][4];  // of each value of bit 2
    UNROLL
    for (int i = 0; i < 8; i++)
      left[i / 2 % 2][i / 4 * 2 + i % 2] = as_type<Pair>(words[4 * r + i]);
    UNROLL
    for (int n = 0; n < 4; n++) {  // bit 1, bit 2 of the channels of the sums
      const bool odd = n % 2 != 0, high = n / 2 != 0;
      const Pair first[2] = {as_type<Pair>(plus), as_type<Pair>(odd ? minus : plus)};
      const Pair second[2] = {as_type<Pair>(high ? minus : plus),
                              as_type<Pair>(odd != high ? minus : plus)};
      float2 sum[2];
      quad_multiply(sum, left[0], first);
      quad_multiply_add(sum, left[1], second);
      UNROLL
      for (int i = 0; i < 2; i++) {
        if (r + i < E) {
          v[8 * (r + i) + 2 * n] = sum[i].x;
          v[8 * (r + i) + 2 * n + 1] = sum[i].y;
        }
      }
    }
  }
  hadamard_registers<D, 1, 4>(v);
  UNROLL
  for (int i = 0; i < 8 * E; i++)
    v[i] *= scale;
}

#endif

// May the signs be those of hadamard_quads?
template <int D, int M, int LANES>
METAL_FUNC bool hadamard_has_quads(device const float* signs, uint lane,
                                   constant HadamardQuantizeParams& p) {
#if QUAD_MATRICES
  if (HADAMARD_QUADS(D, M, LANES) && p.dtype != HADAMARD_FLOAT)
    return hadamard_plain_signs<D>(signs, p.heads, lane);
#endif
  return false;
}

// The signs of the lane's values of a row: those of pair i are bits 15 - i and 31 - i.
template <int D, int M, int LANES>
METAL_FUNC void hadamard_flips(thread uint* flips, device const float* signs, long row, uint lane,
                               constant HadamardQuantizeParams& p) {
  constexpr int VALUES = (D + 31) / 32 * (32 / LANES);
  float sign[VALUES];
  hadamard_row<D, LANES, float>(sign, (device const uchar*)(signs + hadamard_head(row, p) * D),
                                lane, p.wide != 0);
  UNROLL
  for (int i = 0; i < HADAMARD_FLIPS(D); i++)
    flips[i] = 0;
  UNROLL
  for (int i = 0; i < VALUES; i++)
    flips[i / 32] |= as_type<uint>(sign[i]) >> 31 << ((i % 2 != 0 ? 31 : 15) - i / 2 % 16);
}

// hadamard(x, signs) of one row. With `quads` the signs are in `flips`.
template <int D, int M, int LANES>
METAL_FUNC void hadamard_rotate(thread float* v, device const uchar* x, device const float* signs,
                                bool quads, thread const uint* flips, long row, uint lane,
                                constant HadamardQuantizeParams& p) {
#if QUAD_MATRICES
  if constexpr (HADAMARD_QUADS(D, M, LANES)) {
    if (quads) {
      device const uchar* from = x + row * (2 * D);
      const bool is_half = p.dtype == HADAMARD_HALF;
      if (p.wide != 0 && is_half)
        hadamard_by_quads<D, half, true>(v, from, flips, lane, p.scale);
      else if (p.wide != 0)
        hadamard_by_quads<D, bfloat, true>(v, from, flips, lane, p.scale);
      else if (is_half)
        hadamard_by_quads<D, half, false>(v, from, flips, lane, p.scale);
      else
        hadamard_by_quads<D, bfloat, false>(v, from, flips, lane, p.scale);
      return;
    }
  }
#endif
  hadamard_read<D, LANES>(v, x, row, lane, p);
  hadamard_forward<D, M, LANES>(v, signs, row, lane, p);
}

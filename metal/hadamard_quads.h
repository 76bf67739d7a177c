// The transform of 16-bit rows by products of matrices, where the prelude says that these are fast
// (QUAD_MATRICES): signs are +-1, and four lanes hold a row as hadamard.h has it.
//
// Of the bits of a channel 0 and 1 are those of a lane's neighbours, 3 and 4 of the lane: the 16
// values that differ in them are a row of a left matrix. The right matrix is the Hadamard matrix of
// order 16, its columns in the order that leaves sums where their channels belong. Rows 8 to 15 of
// the left matrix are those of the other value of the highest bit of r, over which registers are
// added at the end. For bit 2 and the lower one of r, products with the matrix and its negative
// add up.
#pragma once

#include "hadamard_rows.h"

#define HADAMARD_QUADS(D, M, LANES) (QUAD_MATRICES && (M) == 1 && (D) >= 32 && (LANES) == 4)
// Words of a lane: of a row, and of its signs.
#define HADAMARD_WORDS(D) ((D) > 32 ? (D) / 8 : 8)
#define HADAMARD_FLIPS(D) (((D) + 127) / 128)

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

// The right matrices: their halves +- a matrix of order 8, the signs bits 0 and 1 of c. Of a column
// of that a lane has two entries, of bits 0 (the pair), 3 and 4 of the channel.
template <typename T>
METAL_FUNC void hadamard_quad_matrices(thread uint* right, uint lane) {
  const uint row = lane % 4, column = lane / 4;  // bits 3 and 4 | bits 0, 3 and 4
  const uint one = as_type<ushort>(T(1.0f));
  const uint sign = (metal::popcount(row & (column / 2)) & 1) << 15;
  const uint plus = (one | sign) | (one | (sign ^ (column % 2) << 15)) << 16;
  UNROLL
  for (int c = 0; c < 4; c++) {
    right[2 * c] = c % 2 != 0 ? plus ^ 0x80008000u : plus;
    right[2 * c + 1] = c / 2 != 0 ? plus ^ 0x80008000u : plus;
  }
}

// What the lane holds of a row of x, in pairs.
template <int D>
METAL_FUNC void hadamard_quad_words(thread uint* words, device const uchar* x, long row, uint lane,
                                    bool wide) {
  UNROLL
  for (int r = 0; r < D / 32; r++) {
    device const uchar* from = x + row * (2 * D) + 64 * r + 16 * (lane % 4);
    if (wide) {
      hadamard_words<4>(words + 4 * r, from);
    } else {
      device const ushort* x = (device const ushort*)from;
      UNROLL
      for (int i = 0; i < 4; i++)
        words[4 * r + i] = uint(x[2 * i]) | uint(x[2 * i + 1]) << 16;
    }
  }
}

// The row of `words`.
template <int D, typename T>
METAL_FUNC void hadamard_by_quads(thread float* v, thread const uint* words,
                                  thread const uint* flips, thread const uint* rights,
                                  float scale) {
  typedef vec<T, 2> Pair;
  constexpr int E = D / 32;
  constexpr int HALF = E > 1 ? E / 2 : 1;
  uint turned[8 * HALF];
  UNROLL
  for (int i = 0; i < 8 * HALF; i++)
    turned[i] = i < 4 * E ? words[i] ^ (flips[i / 16] << (i % 16) & 0x80008000u) : 0;
  UNROLL
  for (int n = 0; n < 4 * HALF; n++) {  // bits 1 and 2 of the channels of the sums, and r
    float2 sum[2];
    UNROLL
    for (int k = 0; k < 2 * HALF; k++) {  // bit 2 of the channels that are multiplied, and r
      Pair left[4];
      UNROLL
      for (int i = 0; i < 4; i++)
        left[i] = as_type<Pair>(turned[4 * (k / 2 + i / 2 * HALF) + 2 * (k % 2) + i % 2]);
      const int first = metal::popcount(uint(k & (n / 2))) & 1, second = first ^ n % 2;
      const Pair right[2] = {as_type<Pair>(rights[2 * (first + 2 * second)]),
                             as_type<Pair>(rights[2 * (first + 2 * second) + 1])};
      if (k == 0)
        quad_multiply(sum, left, right);
      else
        quad_multiply_add(sum, left, right);
    }
    UNROLL
    for (int i = 0; i < (E > 1 ? 2 : 1); i++) {
      v[8 * (i * HALF + n / 4) + 2 * (n % 4)] = sum[i].x;
      v[8 * (i * HALF + n / 4) + 2 * (n % 4) + 1] = sum[i].y;
    }
  }
  UNROLL
  for (int i = 0; i < 8 * HALF; i++) {
    if (E > 1) {
      const float a = v[i], b = v[i + 8 * HALF * (E > 1)];
      v[i] = (a + b) * scale;
      v[i + 8 * HALF * (E > 1)] = (a - b) * scale;
    } else {
      v[i] *= scale;
    }
  }
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

// hadamard(x, signs) of one row, times sqrt(D) p.scale. With `quads` the signs are in `flips`.
template <int D, int M, int LANES>
METAL_FUNC void hadamard_rotate(thread float* v, device const uchar* x, device const float* signs,
                                bool quads, thread const uint* flips, long row, uint lane,
                                constant HadamardQuantizeParams& p) {
#if QUAD_MATRICES
  if constexpr (HADAMARD_QUADS(D, M, LANES)) {
    if (quads) {
      uint words[HADAMARD_WORDS(D)], rights[8];
      hadamard_quad_words<D>(words, x, row, lane, p.wide != 0);
      if (p.dtype == HADAMARD_HALF) {
        hadamard_quad_matrices<half>(rights, lane);
        hadamard_by_quads<D, half>(v, words, flips, rights, p.scale);
      } else {
        hadamard_quad_matrices<bfloat>(rights, lane);
        hadamard_by_quads<D, bfloat>(v, words, flips, rights, p.scale);
      }
      return;
    }
  }
#endif
  hadamard_read<D, LANES>(v, x, row, lane, p);
  hadamard_forward<D, M, LANES>(v, signs, row, lane, p);
}

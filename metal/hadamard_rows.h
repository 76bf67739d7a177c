// Rows as the lanes of a simdgroup hold them, several of a row each: reading, the transform, sums.
#pragma once

#include "hadamard.h"

template <int WORDS>
METAL_FUNC void hadamard_words(thread uint* words, device const uchar* from) {
  if (WORDS == 1) {
    words[0] = *(device const uint*)from;
  } else if (WORDS == 2) {
    const uint2 x = *(device const uint2*)from;
    words[0] = x.x;
    words[1] = x.y;
  } else {
    UNROLL
    for (int i = 0; i < WORDS / 4; i++) {
      const uint4 x = ((device const uint4*)from)[i];
      words[4 * i] = x.x;
      words[4 * i + 1] = x.y;
      words[4 * i + 2] = x.z;
      words[4 * i + 3] = x.w;
    }
  }
}

// Value k of those that begin with a word, the word it lies in; the last argument says its type.
METAL_FUNC float hadamard_value(uint word, int, float) {
  return as_type<float>(word);
}
METAL_FUNC float hadamard_value(uint word, int k, half) {
  return float(as_type<half>(ushort(k % 2 == 0 ? word & 0xffff : word >> 16)));
}
METAL_FUNC float hadamard_value(uint word, int k, bfloat) {
  return as_type<float>(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
}
METAL_FUNC float hadamard_value(uint word, int k, char) {
  return float(char((word >> (8 * (k % 4))) & 0xff));
}

// What the lane holds of a row of D values of type T. With `wide` rows lie on multiples of 16
// bytes.
template <int D, int LANES, typename T>
METAL_FUNC void hadamard_row(thread float* v, device const uchar* row, uint lane, bool wide) {
  constexpr int E = (D + 31) / 32, KEPT = 32 / LANES, WORDS = KEPT * int(sizeof(T)) / 4;
  const int first = KEPT * int(lane % LANES);
  if (KEPT > 1 && WORDS > 0 && wide) {
    UNROLL
    for (int r = 0; r < E; r++) {
      uint words[WORDS > 0 ? WORDS : 1];
      hadamard_words<WORDS>(words, row + (32 * r + first) * int(sizeof(T)));
      UNROLL
      for (int k = 0; k < KEPT; k++)
        v[r * KEPT + k] = hadamard_value(words[k * int(sizeof(T)) / 4], k, T(0));
    }
  } else {
    UNROLL
    for (int i = 0; i < E * KEPT; i++) {
      const int c = 32 * (i / KEPT) + first + i % KEPT;
      v[i] = c < D ? float(((device const T*)row)[c]) : 0.0f;
    }
  }
}

template <int D, int LANES>
METAL_FUNC void hadamard_read(thread float* v, device const uchar* x, long row, uint lane,
                              constant HadamardQuantizeParams& p) {
  const bool wide = p.wide != 0;
  if (p.dtype == HADAMARD_FLOAT)
    hadamard_row<D, LANES, float>(v, x + row * (D * 4), lane, wide);
  else if (p.dtype == HADAMARD_HALF)
    hadamard_row<D, LANES, half>(v, x + row * (D * 2), lane, wide);
  else
    hadamard_row<D, LANES, bfloat>(v, x + row * (D * 2), lane, wide);
}

// The head of a row: that of its signs.
METAL_FUNC long hadamard_sequence(long row, constant HadamardQuantizeParams& p) {
  return p.rows >> 32 == 0 ? long(uint(row) / uint(p.seq)) : row / p.seq;  // 64 bits are slow
}
METAL_FUNC int hadamard_head(long row, constant HadamardQuantizeParams& p) {
  return p.heads > 1 ? int(hadamard_sequence(row, p) % p.heads) : 0;
}

// hadamard(x, signs) of one row, read before, times sqrt(D) p.scale.
template <int D, int M, int LANES>
METAL_FUNC void hadamard_forward(thread float* v, device const float* signs, long row, uint lane,
                                 constant HadamardQuantizeParams& p) {
  constexpr int VALUES = (D + 31) / 32 * (32 / LANES);
  float sign[VALUES];
  hadamard_row<D, LANES, float>(sign, (device const uchar*)(signs + hadamard_head(row, p) * D),
                                lane, p.wide != 0);
  UNROLL
  for (int i = 0; i < VALUES; i++)
    v[i] *= sign[i];
  hadamard_transform<D, M, LANES>(v, lane, false, p.scale);
}

// A sum over the 32 values of a row that its lanes hold in part, 32 / LANES each, from the last on:
// of neighbours, then of neighbouring pairs, and so on. Once part[k] is known it adds up what it
// can, lest a lane keep all.
template <int LANES>
METAL_FUNC void hadamard_add(thread float* part, int k) {
  UNROLL
  for (int h = 1; h < 32 / LANES; h *= 2) {
    if (k % (2 * h) == 0)
      part[k] += part[k + h];
  }
}
template <int LANES>
METAL_FUNC float hadamard_sum(thread const float* part) {
  float sum = part[0];
  UNROLL
  for (int h = 1; h < LANES; h *= 2)
    sum += metal::simd_shuffle_xor(sum, ushort(h));
  return sum;
}

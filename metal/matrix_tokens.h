// Byte codes and 16-bit vectors as matrices of a simdgroup, and their products. See
// attention_matrix.h.
#pragma once

#include "params.h"
#include "prelude.h"

// Tokens a simdgroup takes at a time; a block of a centre is a multiple.
#define MATRIX_TOKENS 64

template <typename T>
struct MatrixTypes;
template <>
struct MatrixTypes<half> {
  typedef half2 pair;
  typedef half4 four;
};
template <>
struct MatrixTypes<bfloat> {
  typedef bfloat2 pair;
  typedef bfloat4 four;
};

METAL_FUNC half2 matrix_pair(half a, half b) {
  return half2(a, b);
}
METAL_FUNC bfloat2 matrix_pair(bfloat a, bfloat b) {
  return bfloat2(a, b);
}

// Keys or values of a kv head: codes, or vectors of T.
template <typename T>
struct MatrixSide {
  device const uchar* codes;
  threadgroup const uchar* table;  // the lane's copy, half
  device const T* vectors;
};

// Copies of a table in threadgroup memory, so that lanes rarely want the same bank.
#if THREADGROUP_MEMORY < 40000
#define MATRIX_COPIES(DIMS) ((DIMS) == 8 ? 1 : (DIMS) == 4 ? 4 : 8)
#else
#define MATRIX_COPIES(DIMS) ((DIMS) == 8 ? 1 : (DIMS) == 4 ? 8 : 16)
#endif

// N bytes from an address that is a multiple of N, or of 16.
template <int N>
METAL_FUNC void load_bytes(thread uint* words, device const uchar* at) {
  if (N >= 16) {
    UNROLL
    for (int i = 0; i < N / 16; i++) {
      const uint4 w = ((device const uint4*)at)[i];
      words[N >= 16 ? 4 * i : 0] = w.x;
      words[N >= 16 ? 4 * i + 1 : 0] = w.y;
      words[N >= 16 ? 4 * i + 2 : 0] = w.z;
      words[N >= 16 ? 4 * i + 3 : 0] = w.w;
    }
  } else if (N == 8) {
    const uint2 w = ((device const uint2*)at)[0];
    words[0] = w.x;
    words[N == 8 ? 1 : 0] = w.y;
  } else if (N == 4) {
    words[0] = ((device const uint*)at)[0];
  } else if (N == 2) {
    words[0] = ((device const ushort*)at)[0];
  } else {
    words[0] = at[0];
  }
}

METAL_FUNC uint byte_of(thread const uint* words, int i) {
  return metal::extract_bits(words[i / 4], 8u * uint(i % 4), 8u);
}

// Channels [4 i, 4 i + 4) of those whose codes are `words`; `table` begins with the lane's copy.
template <int DIMS>
METAL_FUNC half4 four_coded(thread const uint* words, threadgroup const uchar* table, int i) {
  constexpr uint ROW = 2 * DIMS * MATRIX_COPIES(DIMS);  // bytes from one row of a copy to the next
  if (DIMS == 2)
    return half4(*(threadgroup const half2*)(table + byte_of(words, 2 * i) * ROW),
                 *(threadgroup const half2*)(table + byte_of(words, 2 * i + 1) * ROW));
  constexpr int FOURS = DIMS >= 4 ? DIMS / 4 : 1;
  return *(threadgroup const half4*)(table + byte_of(words, i / FOURS) * ROW + 8 * (i % FOURS));
}

template <bool CODED, int DIMS>
METAL_FUNC half4 four_channels(thread const uint* words, MatrixSide<half> s, int at, int i) {
  return CODED ? four_coded<DIMS>(words, s.table, i) : ((device const half4*)(s.vectors + at))[i];
}
template <bool CODED, int DIMS>
METAL_FUNC bfloat4 four_channels(thread const uint* words, MatrixSide<bfloat> s, int at, int i) {
  return ((device const bfloat4*)(s.vectors + at))[i];
}

// The side from token `base` on.
template <typename T, int D, int DIMS>
METAL_FUNC MatrixSide<T> from_token(MatrixSide<T> s, long base) {
  s.codes += base * (D / DIMS);
  s.vectors += base * D;
  return s;
}

// Codes a lane needs of the channels it takes of a key or value, in bytes and words.
#define MATRIX_PAIRS (MATRIX_TOKENS / 16)
#define MATRIX_BYTES(CODED, CHANNELS, DIMS) ((CODED) ? (CHANNELS) / (DIMS) : 4)
#define MATRIX_WORDS(CODED, CHANNELS, DIMS) ((MATRIX_BYTES(CODED, CHANNELS, DIMS) + 3) / 4)

// Codes of MATRIX_TOKENS tokens, loaded ahead of their use; tokens beyond `last` repeat it.
template <int D, int DIMS>
METAL_FUNC void load_keys(thread uint* words, device const uchar* codes, int last, uint lane) {
  constexpr int BYTES = MATRIX_BYTES(true, D / 4, DIMS), WORDS = MATRIX_WORDS(true, D / 4, DIMS);
  const int row = int(matrix_row(lane)), quarter = int(matrix_column(lane)) / 2;
  UNROLL
  for (int i = 0; i < 2 * MATRIX_PAIRS; i++) {
    const int token = metal::min(8 * i + row, last);
    load_bytes<BYTES>(words + i * WORDS, codes + token * (D / DIMS) + quarter * BYTES);
  }
}
template <int D, int DIMS>
METAL_FUNC void load_values(thread uint* words, device const uchar* codes, int last, uint lane) {
  constexpr int BYTES = MATRIX_BYTES(true, D / 8, DIMS), WORDS = MATRIX_WORDS(true, D / 8, DIMS);
  const int eighth = int(matrix_row(lane)), column = int(matrix_column(lane));
  UNROLL
  for (int i = 0; i < 4 * MATRIX_PAIRS; i++) {
    const int token = metal::min(16 * (i / 4) + i % 4 / 2 * 8 + column + i % 2, last);
    load_bytes<BYTES>(words + i * WORDS, codes + token * (D / DIMS) + eighth * BYTES);
  }
}

// st[nb][t / 8] += products of tokens t with query rows; `words` are codes as loaded above.
template <typename T, bool CODED, int D, int DIMS, int NB>
METAL_FUNC void matrix_scores(thread float2* st, thread const typename MatrixTypes<T>::pair* qf,
                              thread const uint* words, MatrixSide<T> s, int last, uint lane) {
  constexpr int WORDS = MATRIX_WORDS(CODED, D / 4, DIMS);
  const int row = int(matrix_row(lane)), quarter = int(matrix_column(lane)) / 2;
  UNROLL
  for (int k = 0; k < D / 16; k++) {
    UNROLL
    for (int pair = 0; pair < MATRIX_PAIRS; pair++) {
      typename MatrixTypes<T>::pair left[4];
      UNROLL
      for (int i = 0; i < 2; i++) {
        const int at = metal::min(8 * (2 * pair + i) + row, last) * D + quarter * (D / 4);
        const typename MatrixTypes<T>::four x =
            four_channels<CODED, DIMS>(words + (2 * pair + i) * (CODED ? WORDS : 0), s, at, k);
        left[2 * i] = matrix_pair(x.x, x.y);
        left[2 * i + 1] = matrix_pair(x.z, x.w);
      }
      UNROLL
      for (int nb = 0; nb < NB; nb++)
        matrix_multiply_add(st + nb * (MATRIX_TOKENS / 8) + 2 * pair, left,
                            qf + (nb * (D / 16) + k) * 2);
    }
  }
}

// ot[nb][channel / 8 of a lane's order] += values of the tokens, weighted by pt.
template <typename T, bool CODED, int D, int DIMS, int NB>
METAL_FUNC void matrix_values(thread float2* ot, thread const typename MatrixTypes<T>::pair* pt,
                              thread const uint* words, MatrixSide<T> s, int last, uint lane) {
  typedef typename MatrixTypes<T>::pair Pair;
  typedef typename MatrixTypes<T>::four Four;
  constexpr int WORDS = MATRIX_WORDS(CODED, D / 8, DIMS);
  const int eighth = int(matrix_row(lane)), column = int(matrix_column(lane));
  UNROLL
  for (int pair = 0; pair < MATRIX_PAIRS; pair++) {
    UNROLL
    for (int i = 0; i < D / 32; i++) {
      Four x[4];
      UNROLL
      for (int j = 0; j < 4; j++) {
        const int slot = 16 * pair + j / 2 * 8 + column + j % 2;
        const int at = metal::min(slot, last) * D + eighth * (D / 8);
        x[j] = four_channels<CODED, DIMS>(words + (4 * pair + j) * (CODED ? WORDS : 0), s, at, i);
        if (!CODED && slot > last)
          x[j] = Four(T(0.0f));  // what lies there may be NaN, and 0 * NaN is not 0
      }
      UNROLL
      for (int h = 0; h < 2; h++) {
        Pair left[4];
        left[0] = h == 0 ? matrix_pair(x[0].x, x[1].x) : matrix_pair(x[0].z, x[1].z);
        left[1] = h == 0 ? matrix_pair(x[2].x, x[3].x) : matrix_pair(x[2].z, x[3].z);
        left[2] = h == 0 ? matrix_pair(x[0].y, x[1].y) : matrix_pair(x[0].w, x[1].w);
        left[3] = h == 0 ? matrix_pair(x[2].y, x[3].y) : matrix_pair(x[2].w, x[3].w);
        UNROLL
        for (int nb = 0; nb < NB; nb++)
          matrix_multiply_add(ot + nb * (D / 8) + 4 * i + 2 * h, left,
                              pt + (nb * MATRIX_PAIRS + pair) * 2);
      }
    }
  }
}

// Codes and 16-bit vectors as matrices of a simdgroup, and their products. See
// attention_matrix.h.
#pragma once

#include "attention.h"
#include "matrix_codes.h"
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
  int bits;  // of a trellis code
  MatrixTable table;
  device const T* vectors;
};

template <bool CODED, int CODE, int CHANNELS>
METAL_FUNC half4 four_channels(thread const uint* words, MatrixSide<half> s, int at, int i,
                               uint skew) {
  return CODED ? four_coded<CODE, CHANNELS>(words, s.table, i, skew)
               : ((device const half4*)(s.vectors + at))[i];
}
template <bool CODED, int CODE, int CHANNELS>
METAL_FUNC bfloat4 four_channels(thread const uint* words, MatrixSide<bfloat> s, int at, int i,
                                 uint skew) {
  return ((device const bfloat4*)(s.vectors + at))[i];
}

// Bytes of the codes of a token.
template <int CODE, int D, typename T>
METAL_FUNC int side_row(MatrixSide<T> s) {
  return CODE == TRELLIS_ANY ? D / 8 * s.bits + 1 : CODE_ROW(CODE, D);
}

// Words that a lane has of the channels it takes of a key or value, at most.
#define MATRIX_WORDS(CODED, CHANNELS, CODE) ((CODED) ? CODE_WORDS(CODE_OF(CODE, 4), CHANNELS) : 1)

// Token t of those that matrix row `row` stands for in the products: neighbours.
METAL_FUNC int matrix_token(int row, int t) {
  return MATRIX_TOKENS / 8 * row + t;
}

// Codes of a block, of COUNT of the tokens that a lane has of it.
template <int D, int CODE, int COUNT>
METAL_FUNC void load_keys(thread uint* words, device const uchar* codes, int from, uint lane) {
  constexpr int WORDS = CODE_WORDS(CODE, D / 4);
  const int row = int(matrix_row(lane)), quarter = int(matrix_column(lane)) / 2;
  codes += matrix_token(row, 0) * CODE_ROW(CODE, D) + code_part<CODE, D / 4>(quarter);
  UNROLL
  for (int t = from; t < from + COUNT; t++)
    load_codes<CODE, D / 4, D>(words + t * WORDS, codes, quarter, t);
}
template <int D, int CODE, int COUNT>
METAL_FUNC void load_values(thread uint* words, device const uchar* codes, int from, uint lane) {
  constexpr int WORDS = CODE_WORDS(CODE, D / 8);
  const int eighth = int(matrix_row(lane)), column = int(matrix_column(lane));
  codes += matrix_token(column, 0) * CODE_ROW(CODE, D) + code_part<CODE, D / 8>(eighth);
  UNROLL
  for (int i = from; i < from + COUNT; i++)
    load_codes<CODE, D / 8, D>(words + i * WORDS, codes, eighth, matrix_token(i % 2, i / 2));
}

// Scales of the tokens of a lane's row.
METAL_FUNC void load_scales(thread float* scales, device const bfloat* at, bool aligned) {
  if (aligned) {
    const uint4 w = *(device const uint4*)at;
    const uint words[4] = {w.x, w.y, w.z, w.w};
    UNROLL
    for (int i = 0; i < 4; i++) {
      scales[2 * i] = as_type<float>(words[i] << 16);
      scales[2 * i + 1] = as_type<float>(words[i] & 0xffff0000u);
    }
  } else {
    UNROLL
    for (int t = 0; t < MATRIX_TOKENS / 8; t++)
      scales[t] = float(at[t]);
  }
}

// st[nb][t] += products of channels [4 k, 4 k + 4) of the lane's quarter of tokens (row, t) and
// (row, t + 1) with query rows; `words` are codes as loaded above.
template <typename T, bool CODED, int D, int CODE, int NB>
METAL_FUNC void score_step(thread float2* st, thread const typename MatrixTypes<T>::pair* qf,
                           thread const uint* words, MatrixSide<T> s, int last, int k, int t,
                           uint lane) {
  constexpr int WORDS = MATRIX_WORDS(CODED, D / 4, CODE);
  const int row = int(matrix_row(lane)), quarter = int(matrix_column(lane)) / 2;
  typename MatrixTypes<T>::pair left[4];
  UNROLL
  for (int i = 0; i < 2; i++) {
    const int at = metal::min(matrix_token(row, t + i), last) * D + quarter * (D / 4);
    const uint skew = code_skew<CODE, D / 4, D>(quarter, t + i);
    const typename MatrixTypes<T>::four x =
        four_channels<CODED, CODE, D / 4>(words + (t + i) * (CODED ? WORDS : 0), s, at, k, skew);
    left[2 * i] = matrix_pair(x.x, x.y);
    left[2 * i + 1] = matrix_pair(x.z, x.w);
  }
  UNROLL
  for (int nb = 0; nb < NB; nb++)
    matrix_multiply_add(st + nb * (MATRIX_TOKENS / 8) + t, left, qf + (nb * (D / 16) + k) * 2);
}
// LATE: the codes are loaded here, from the block s.codes.
template <typename T, bool CODED, int D, int CODE, int NB, bool LATE>
METAL_FUNC void matrix_scores(thread float2* st, thread const typename MatrixTypes<T>::pair* qf,
                              thread uint* words, MatrixSide<T> s, int last, uint lane) {
  if (CODED && CODE < 0) {  // token by token: their words are shifted together
    UNROLL
    for (int t = 0; t < MATRIX_TOKENS / 8; t += 2) {
      if (LATE)
        load_keys<D, CODE, 2>(words, s.codes, t, lane);
      UNROLL
      for (int k = 0; k < D / 16; k++)
        score_step<T, CODED, D, CODE, NB>(st, qf, words, s, last, k, t, lane);
    }
  } else {
    UNROLL
    for (int k = 0; k < D / 16; k++) {
      UNROLL
      for (int t = 0; t < MATRIX_TOKENS / 8; t += 2)
        score_step<T, CODED, D, CODE, NB>(st, qf, words, s, last, k, t, lane);
    }
  }
}

// Channels [4 i, 4 i + 4) of the lane's eighth of value token (column + j % 2, j / 2).
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC typename MatrixTypes<T>::four value_channels(thread const uint* words, MatrixSide<T> s,
                                                        int last, int j, int i, uint lane) {
  constexpr int WORDS = MATRIX_WORDS(CODED, D / 8, CODE);
  const int slot = matrix_token(int(matrix_column(lane)) + j % 2, j / 2);
  const int at = metal::min(slot, last) * D + int(matrix_row(lane)) * (D / 8);
  const uint skew = code_skew<CODE, D / 8, D>(int(matrix_row(lane)), matrix_token(j % 2, j / 2));
  typename MatrixTypes<T>::four x =
      four_channels<CODED, CODE, D / 8>(words + j * (CODED ? WORDS : 0), s, at, i, skew);
  if (!CODED && slot > last)  // what lies there may be NaN, and 0 * NaN is not 0
    x = typename MatrixTypes<T>::four(T(0.0f));
  return x;
}

// out[nb][channel of the lane's eighth] += values of the tokens, weighted by pt. LATE: as above.
template <typename T, bool CODED, int D, int CODE, int NB, bool LATE>
METAL_FUNC void matrix_values(thread float2* out, thread const typename MatrixTypes<T>::pair* pt,
                              thread uint* words, MatrixSide<T> s, int last, uint lane) {
  typedef typename MatrixTypes<T>::pair Pair;
  typedef typename MatrixTypes<T>::four Four;
  UNROLL
  for (int t = 0; t < MATRIX_TOKENS / 8; t += 2) {
    if (CODED && LATE)
      load_values<D, CODE, 4>(words, s.codes, 2 * t, lane);
    UNROLL
    for (int i = 0; i < D / 32; i++) {
      Four x[4];
      UNROLL
      for (int j = 0; j < 4; j++)
        x[j] = value_channels<T, CODED, D, CODE>(words, s, last, 2 * t + j, i, lane);
      UNROLL
      for (int h = 0; h < 2; h++) {
        Pair left[4];
        left[0] = h == 0 ? matrix_pair(x[0].x, x[1].x) : matrix_pair(x[0].z, x[1].z);
        left[1] = h == 0 ? matrix_pair(x[2].x, x[3].x) : matrix_pair(x[2].z, x[3].z);
        left[2] = h == 0 ? matrix_pair(x[0].y, x[1].y) : matrix_pair(x[0].w, x[1].w);
        left[3] = h == 0 ? matrix_pair(x[2].y, x[3].y) : matrix_pair(x[2].w, x[3].w);
        UNROLL
        for (int nb = 0; nb < NB; nb++)
          matrix_multiply_add(out + nb * (D / 8) + 4 * i + 2 * h, left,
                              pt + nb * (MATRIX_TOKENS / 8) + t);
      }
    }
  }
}

// The same for four query rows, which leave half of the columns free: channels are taken in pairs,
// as they are decoded, and pt has the weights of a row in the two columns of a pair.
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC void paired_values(thread float2* out, thread const typename MatrixTypes<T>::pair* pt,
                              thread const uint* words, MatrixSide<T> s, int last, uint lane) {
  UNROLL
  for (int t = 0; t < MATRIX_TOKENS / 8; t++) {
    UNROLL
    for (int i = 0; i < D / 32; i++) {
      typename MatrixTypes<T>::pair left[4];
      UNROLL
      for (int j = 0; j < 2; j++) {
        const typename MatrixTypes<T>::four x =
            value_channels<T, CODED, D, CODE>(words, s, last, 2 * t + j, i, lane);
        left[j] = matrix_pair(x.x, x.y);
        left[2 + j] = matrix_pair(x.z, x.w);
      }
      matrix_multiply_add(out + 2 * i, left, pt + 2 * t);
    }
  }
}

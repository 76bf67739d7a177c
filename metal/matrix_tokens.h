// Byte codes and 16-bit vectors as matrices of a simdgroup, and their products. See
// attention_matrix.h.
#pragma once

#include "attention.h"
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

struct MatrixTable {
  threadgroup const uchar* rows;
  uint at;  // of the lane's copy in a row
};

// Keys or values of a kv head: codes, or vectors of T.
template <typename T>
struct MatrixSide {
  device const uchar* codes;
  MatrixTable table;
  device const T* vectors;
};

// Rows of the tables of keys and values alternate in threadgroup memory. A table's half of a row
// repeats it, so that lanes rarely want the same bank.
#define MATRIX_COPIES(DIMS) (TABLE_ROW_BYTES / (4 * (DIMS)))

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

// Channels [4 i, 4 i + 4) of those whose codes are `words`.
template <int DIMS>
METAL_FUNC half4 four_coded(thread const uint* words, MatrixTable t, int i) {
  if (DIMS == 2)
    return half4(
        *(threadgroup const half2*)(t.rows + table_row(words[i / 2], 4 * i % 8 / 2, t.at)),
        *(threadgroup const half2*)(t.rows + table_row(words[i / 2], 4 * i % 8 / 2 + 1, t.at)));
  constexpr int FOURS = DIMS >= 4 ? DIMS / 4 : 1;
  const uint row = table_row(words[i / FOURS / 4], i / FOURS % 4, t.at);
  return *(threadgroup const half4*)(t.rows + row + 8 * (i % FOURS));
}

template <bool CODED, int DIMS>
METAL_FUNC half4 four_channels(thread const uint* words, MatrixSide<half> s, int at, int i) {
  return CODED ? four_coded<DIMS>(words, s.table, i) : ((device const half4*)(s.vectors + at))[i];
}
template <bool CODED, int DIMS>
METAL_FUNC bfloat4 four_channels(thread const uint* words, MatrixSide<bfloat> s, int at, int i) {
  return ((device const bfloat4*)(s.vectors + at))[i];
}

// Codes a lane needs of the channels it takes of a key or value, in bytes and words.
#define MATRIX_BYTES(CODED, CHANNELS, DIMS) ((CODED) ? (CHANNELS) / (DIMS) : 4)
#define MATRIX_WORDS(CODED, CHANNELS, DIMS) ((MATRIX_BYTES(CODED, CHANNELS, DIMS) + 3) / 4)

// Token t of those that matrix row `row` stands for in the products: neighbours.
METAL_FUNC int matrix_token(int row, int t) {
  return MATRIX_TOKENS / 8 * row + t;
}

// Codes of MATRIX_TOKENS tokens, loaded ahead of their use.
template <int D, int DIMS>
METAL_FUNC void load_keys(thread uint* words, device const uchar* codes, uint lane) {
  constexpr int BYTES = MATRIX_BYTES(true, D / 4, DIMS), WORDS = MATRIX_WORDS(true, D / 4, DIMS);
  const int row = int(matrix_row(lane)), quarter = int(matrix_column(lane)) / 2;
  codes += matrix_token(row, 0) * (D / DIMS) + quarter * BYTES;
  UNROLL
  for (int t = 0; t < MATRIX_TOKENS / 8; t++)
    load_bytes<BYTES>(words + t * WORDS, codes + t * (D / DIMS));
}
template <int D, int DIMS>
METAL_FUNC void load_values(thread uint* words, device const uchar* codes, uint lane) {
  constexpr int BYTES = MATRIX_BYTES(true, D / 8, DIMS), WORDS = MATRIX_WORDS(true, D / 8, DIMS);
  const int eighth = int(matrix_row(lane)), column = int(matrix_column(lane));
  codes += matrix_token(column, 0) * (D / DIMS) + eighth * BYTES;
  UNROLL
  for (int i = 0; i < MATRIX_TOKENS / 4; i++)
    load_bytes<BYTES>(words + i * WORDS, codes + matrix_token(i % 2, i / 2) * (D / DIMS));
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

// Puts the values of both tables, rows of DIMS, into every copy of their rows.
template <int DIMS, int THREADS>
METAL_FUNC void fill_tables(threadgroup uchar* rows, device const float* keys,
                            device const float* values, uint tid) {
  constexpr int PARTS = TABLE_ROW_BYTES / 32;  // of 16 bytes, in a table's half of a row
  for (int i = int(tid); i < 512; i += THREADS) {
    device const float* from = (i < 256 ? keys : values) + i % 256 * DIMS;
    uint words[4];
    UNROLL
    for (int w = 0; w < 4; w++)
      words[w] = as_type<uint>(half2(half(from[2 * w % DIMS]), half(from[2 * w % DIMS + 1])));
    threadgroup uint4* to =
        (threadgroup uint4*)(rows + i % 256 * TABLE_ROW_BYTES) + i / 256 * PARTS;
    UNROLL
    for (int part = 0; part < PARTS; part++)
      to[(part + int(tid)) % PARTS] = uint4(words[0], words[1], words[2], words[3]);
  }
}

// st[nb][t] += products of tokens (row, t) with query rows; `words` are codes as loaded above.
template <typename T, bool CODED, int D, int DIMS, int NB>
METAL_FUNC void matrix_scores(thread float2* st, thread const typename MatrixTypes<T>::pair* qf,
                              thread const uint* words, MatrixSide<T> s, int last, uint lane) {
  constexpr int WORDS = MATRIX_WORDS(CODED, D / 4, DIMS);
  const int row = int(matrix_row(lane)), quarter = int(matrix_column(lane)) / 2;
  UNROLL
  for (int k = 0; k < D / 16; k++) {
    UNROLL
    for (int t = 0; t < MATRIX_TOKENS / 8; t += 2) {
      typename MatrixTypes<T>::pair left[4];
      UNROLL
      for (int i = 0; i < 2; i++) {
        const int at = metal::min(matrix_token(row, t + i), last) * D + quarter * (D / 4);
        const typename MatrixTypes<T>::four x =
            four_channels<CODED, DIMS>(words + (t + i) * (CODED ? WORDS : 0), s, at, k);
        left[2 * i] = matrix_pair(x.x, x.y);
        left[2 * i + 1] = matrix_pair(x.z, x.w);
      }
      UNROLL
      for (int nb = 0; nb < NB; nb++)
        matrix_multiply_add(st + nb * (MATRIX_TOKENS / 8) + t, left, qf + (nb * (D / 16) + k) * 2);
    }
  }
}

// Channels [4 i, 4 i + 4) of the lane's eighth of value token (column + j % 2, j / 2).
template <typename T, bool CODED, int D, int DIMS>
METAL_FUNC typename MatrixTypes<T>::four value_channels(thread const uint* words, MatrixSide<T> s,
                                                        int last, int j, int i, uint lane) {
  constexpr int WORDS = MATRIX_WORDS(CODED, D / 8, DIMS);
  const int slot = matrix_token(int(matrix_column(lane)) + j % 2, j / 2);
  const int at = metal::min(slot, last) * D + int(matrix_row(lane)) * (D / 8);
  typename MatrixTypes<T>::four x =
      four_channels<CODED, DIMS>(words + j * (CODED ? WORDS : 0), s, at, i);
  if (!CODED && slot > last)  // what lies there may be NaN, and 0 * NaN is not 0
    x = typename MatrixTypes<T>::four(T(0.0f));
  return x;
}

// out[nb][channel of the lane's eighth] += values of the tokens, weighted by pt.
template <typename T, bool CODED, int D, int DIMS, int NB>
METAL_FUNC void matrix_values(thread float2* out, thread const typename MatrixTypes<T>::pair* pt,
                              thread const uint* words, MatrixSide<T> s, int last, uint lane) {
  typedef typename MatrixTypes<T>::pair Pair;
  typedef typename MatrixTypes<T>::four Four;
  UNROLL
  for (int t = 0; t < MATRIX_TOKENS / 8; t += 2) {
    UNROLL
    for (int i = 0; i < D / 32; i++) {
      Four x[4];
      UNROLL
      for (int j = 0; j < 4; j++)
        x[j] = value_channels<T, CODED, D, DIMS>(words, s, last, 2 * t + j, i, lane);
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
template <typename T, bool CODED, int D, int DIMS>
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
            value_channels<T, CODED, D, DIMS>(words, s, last, 2 * t + j, i, lane);
        left[j] = matrix_pair(x.x, x.y);
        left[2 + j] = matrix_pair(x.z, x.w);
      }
      matrix_multiply_add(out + 2 * i, left, pt + 2 * t);
    }
  }
}

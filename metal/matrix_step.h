// One step of attention by matrices: scores of 64 tokens, their softmax, weighted values. See
// attention_matrix.h.
#pragma once

#include "attention.h"
#include "matrix_tokens.h"

// Query rows of a tile: bands of eight columns; four rows take a band, two columns each.
#define MATRIX_BANDS(ROWS) (((ROWS) + 7) / 8)
// Rows that a lane has scores of.
#define MATRIX_COLUMNS(ROWS) ((ROWS) == 4 ? 1 : (ROWS) / 4)
// Steps whose centres are multiplied at once.
#define MATRIX_TURNS 16
// Weights are relative to a score seen before; beyond 2^8 a higher one takes its place.
#define MATRIX_SLACK 8.0f

// Whether outputs and queries leave too few registers for trellis codes of a whole step, so that
// these are loaded where they are used; byte codes are always loaded ahead.
#define MATRIX_LATE(D, CODE, ROWS) ((CODE) <= 0 && (ROWS) * (D) > 1024)

// What a simdgroup has of its query rows.
template <int D, int ROWS>
struct MatrixState {
  float2 out[ROWS * D / 64];
  float m[MATRIX_COLUMNS(ROWS)], l[MATRIX_COLUMNS(ROWS)];  // l: of this lane's tokens only
  float unit, inverse;  // of the scales of the values: out counts in it
};

template <int D, int ROWS>
METAL_FUNC void start_state(thread MatrixState<D, ROWS>& state) {
  UNROLL
  for (int i = 0; i < ROWS * D / 64; i++)
    state.out[i] = float2(0.0f, 0.0f);
  UNROLL
  for (int n = 0; n < MATRIX_COLUMNS(ROWS); n++) {
    state.m[n] = ATTENTION_NEVER;
    state.l[n] = 0.0f;
  }
  state.unit = state.inverse = 0.0f;
}

// The row of the tile that a lane's scores n are of.
template <int ROWS>
METAL_FUNC int matrix_query_row(int n, uint lane) {
  return ROWS == 4 ? int(matrix_column(lane)) / 2 : n / 2 * 8 + int(matrix_column(lane)) + n % 2;
}

// Channel i of the lane's eighth of the output for its row n.
template <int D, int ROWS>
METAL_FUNC float matrix_output(thread const MatrixState<D, ROWS>& state, int n, int i) {
  if (ROWS == 4)
    return i % 2 == 0 ? state.out[i / 2].x : state.out[i / 2].y;
  return n % 2 == 0 ? state.out[n / 2 * (D / 8) + i].x : state.out[n / 2 * (D / 8) + i].y;
}

// A row's limits and the factor of its scores, in threadgroup memory.
struct MatrixRows {
  threadgroup const int* sinks;
  threadgroup const int* first;
  threadgroup const int* last;
  threadgroup const float* scale;
};

struct MatrixScales {
  device const bfloat* keys;
  device const bfloat* values;
  device const char* centres;
  device const bfloat* centre_scales;
  int tokens;  // that the arrays have room for
  int block;   // tokens of a centre
  bool scaled, weighted, centred;
};

// The step of a simdgroup: blocks of MATRIX_TOKENS tokens.
struct MatrixTurn {
  int block, next, turn;
  int end;     // tokens that some row sees
  bool plain;  // every row sees all tokens of the block
};

// Where the tokens of a block are read: all within the arrays, so the last may begin before it.
METAL_FUNC int block_start(int block, MatrixScales scales) {
  return metal::min(block * MATRIX_TOKENS, scales.tokens - MATRIX_TOKENS);
}
METAL_FUNC device const uchar* from_block(device const uchar* codes, int block, MatrixScales scales,
                                          int bytes) {
  return codes + long(block_start(block, scales)) * bytes;
}

// Where what 16 bits lose of the query rows lies in threadgroup memory, after these; 0 where there
// is no room for it.
#define MATRIX_REST(D, ROWS) ((ROWS) * (D) <= 2048 ? (ROWS) * (D) : 0)

// Right matrix i of query rows 8 nb and on, whose row 2 c + e is channel e of the pair at 2 i of
// quarter c. Four rows take two columns each.
template <typename T, int D, int ROWS>
METAL_FUNC typename MatrixTypes<T>::pair matrix_query(threadgroup const T* q, int nb, int i,
                                                      uint lane) {
  const int row = int(matrix_row(lane)), column = int(matrix_column(lane));
  const int channel = row / 2 * (D / 4) + 2 * i + row % 2;
  threadgroup const T* at = q + (ROWS == 4 ? column / 2 : 8 * nb + column) * D + channel;
  return matrix_right(matrix_pair(at[0], at[ROWS == 4 ? 0 : D]));
}

// Scores of the centres of the steps at block `first` and ATTENTION_SIMDS blocks on, row by row. A
// centre may be much larger than what is coded beside it, and an error of its score is that of 64
// tokens: what 16 bits lose of the queries, `rest`, has a product of its own.
template <typename T, int D, int ROWS>
METAL_FUNC void centre_scores(thread float* centres, thread const typename MatrixTypes<T>::pair* qf,
                              threadgroup const T* rest, MatrixScales scales, int first, int last,
                              uint lane) {
  constexpr int BANDS = MATRIX_BANDS(ROWS), COLUMNS = MATRIX_COLUMNS(ROWS);
  float2 products[2 * BANDS];
  UNROLL
  for (int i = 0; i < 2 * BANDS; i++)
    products[i] = float2(0.0f, 0.0f);
  device const char4* at[2];
  float unit[2];
  UNROLL
  for (int i = 0; i < 2; i++) {
    const int turn = first + ATTENTION_SIMDS * (8 * i + int(matrix_row(lane)));
    const int index = metal::min(turn, last) * MATRIX_TOKENS / scales.block;
    at[i] = (device const char4*)(scales.centres + long(index) * D +
                                  int(matrix_column(lane)) / 2 * (D / 4));
    unit[i] = float(scales.centre_scales[index]);
  }
  UNROLL
  for (int k = 0; k < D / 16; k++) {
    typename MatrixTypes<T>::pair left[4];
    UNROLL
    for (int i = 0; i < 2; i++) {
      const char4 c = at[i][k];
      left[2 * i] = matrix_pair(T(float(c.x)), T(float(c.y)));
      left[2 * i + 1] = matrix_pair(T(float(c.z)), T(float(c.w)));
    }
    UNROLL
    for (int nb = 0; nb < BANDS; nb++) {
      matrix_multiply_add(products + 2 * nb, left, qf + (nb * (D / 16) + k) * 2);
      if (MATRIX_REST(D, ROWS) != 0) {
        typename MatrixTypes<T>::pair more[2];
        UNROLL
        for (int i = 0; i < 2; i++)
          more[i] = matrix_query<T, D, ROWS>(rest, nb, 2 * k + i, lane);
        matrix_multiply_add(products + 2 * nb, left, more);
      }
    }
  }
  UNROLL
  for (int i = 0; i < 2; i++) {
    UNROLL
    for (int n = 0; n < COLUMNS; n++) {
      const float2 both = products[2 * (n / 2) + i];
      centres[i * COLUMNS + n] = (n % 2 == 0 ? both.x : both.y) * unit[i];
    }
  }
}

// The scores of a step times the scales of rows and tokens, hidden ones NEVER.
template <bool CODED, int ROWS>
METAL_FUNC void finish_scores(thread float* s, thread const float* centres, thread const float* by,
                              MatrixScales scales, MatrixRows rows, MatrixTurn at, int start,
                              uint lane) {
  constexpr int TB = MATRIX_TOKENS / 8, COLUMNS = MATRIX_COLUMNS(ROWS);
  UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    const float factor = rows.scale[matrix_query_row<ROWS>(n, lane)];
    float centre = 0.0f;
    if (CODED && scales.centred)
      centre = factor * matrix_from_row(at.turn < 8 ? centres[n] : centres[COLUMNS + n],
                                        uint(at.turn) % 8, lane);
    UNROLL
    for (int t = 0; t < TB; t++)
      s[n * TB + t] =
          CODED ? metal::fma(s[n * TB + t], by[t] * factor, centre) : s[n * TB + t] * factor;
  }
  if (at.plain && start == at.block * MATRIX_TOKENS)
    return;
  UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    const int r = matrix_query_row<ROWS>(n, lane);
    const int sinks = rows.sinks[r], last = rows.last[r];
    const int first = metal::max(rows.first[r], at.block * MATRIX_TOKENS);
    UNROLL
    for (int t = 0; t < TB; t++) {
      const int slot = start + matrix_token(int(matrix_row(lane)), t);
      const bool visible = (slot < sinks) | ((slot >= first) & (slot < last));
      s[n * TB + t] = visible ? s[n * TB + t] : ATTENTION_NEVER;
    }
  }
}

// Raises the references of weights and the unit of the values to what a step has.
template <int D, int ROWS>
METAL_FUNC void raise_state(thread MatrixState<D, ROWS>& state, thread const float* top,
                            float most) {
  constexpr int COLUMNS = MATRIX_COLUMNS(ROWS);
  const float unit = metal::max(state.unit, matrix_max_rows(most));
  const float by = unit > 0.0f ? state.unit / unit : 1.0f;
  state.inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
  state.unit = unit;
  UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    const float m = metal::max(state.m[n], matrix_max_rows(top[n]));
    const float shrink = metal::exp2(state.m[n] - m);
    state.m[n] = m;
    state.l[n] *= shrink;
    UNROLL
    for (int i = 0; i < D / 16; i++) {
      if (ROWS == 4) {
        state.out[i] = state.out[i] * (shrink * by);
      } else {
        thread float2* out = state.out + n / 2 * (D / 8) + 2 * i;
        UNROLL
        for (int j = 0; j < 2; j++)
          out[j] = n % 2 == 0 ? float2(out[j].x * (shrink * by), out[j].y)
                              : float2(out[j].x, out[j].y * (shrink * by));
      }
    }
  }
}

// The scores of a step, then the key codes of the next.
template <typename T, bool CODED, int D, int CODE, int NB, bool LATE>
METAL_FUNC void step_scores(thread float2* st, thread const typename MatrixTypes<T>::pair* qf,
                            thread uint* words, MatrixSide<T> keys, MatrixScales scales,
                            MatrixTurn at, int last, uint lane) {
  matrix_scores<T, CODED, D, CODE, NB, LATE>(st, qf, words, keys, last, lane);
  if (CODED && !LATE && at.next != at.block)
    load_keys<D, CODE, MATRIX_TOKENS / 8>(
        words, from_block(keys.codes, at.next, scales, CODE_ROW(CODE, D)), 0, lane);
}

// `words` are the key codes of this block; those of the next take their place. LATE steps load
// theirs.
template <typename T, bool CODED, int D, int CODE, int ROWS>
METAL_FUNC void matrix_step(thread MatrixState<D, ROWS>& state,
                            thread const typename MatrixTypes<T>::pair* qf, thread uint* words,
                            thread const float* centres, MatrixSide<T> keys, MatrixSide<T> values,
                            MatrixScales scales, MatrixRows rows, MatrixTurn at, uint lane) {
  constexpr int TB = MATRIX_TOKENS / 8;
  constexpr int BANDS = MATRIX_BANDS(ROWS), COLUMNS = MATRIX_COLUMNS(ROWS);
  constexpr bool LATE = MATRIX_LATE(D, CODE, ROWS);
  const int row = int(matrix_row(lane)), base = at.block * MATRIX_TOKENS;
  const int start = CODED ? block_start(at.block, scales) : base;
  const int last = at.end - 1 - base;
  const bool plain = at.plain && start == base;
  uint value_words[(MATRIX_TOKENS / 4) * MATRIX_WORDS(CODED, D / 8, CODE)];
  float by[TB], weigh[TB];
  UNROLL
  for (int t = 0; t < TB; t++)
    by[t] = weigh[t] = 1.0f;
  if (CODED) {
    values.codes = from_block(values.codes, at.block, scales, side_row<CODE, D>(values));
    if (LATE)
      keys.codes = from_block(keys.codes, at.block, scales, side_row<CODE, D>(keys));
    else
      FOR_SIDE_CODE(
          CODE, values.bits,
          load_values<D, SIDE_CODE, MATRIX_TOKENS / 4>(value_words, values.codes, 0, lane))
    const bool aligned = scales.tokens % 8 == 0;
    if (scales.scaled)
      load_scales(by, scales.keys + start + matrix_token(row, 0), aligned);
    if (scales.weighted)
      load_scales(weigh, scales.values + start + matrix_token(row, 0), aligned);
  } else {
    keys.vectors += long(base) * D;
    values.vectors += long(base) * D;
  }

  float2 products[BANDS * TB];
  UNROLL
  for (int i = 0; i < BANDS * TB; i++)
    products[i] = float2(0.0f, 0.0f);
  FOR_SIDE_CODE(CODE, keys.bits,
                step_scores<T, CODED, D, SIDE_CODE, BANDS, LATE>(products, qf, words, keys, scales,
                                                                 at, last, lane))
  float s[COLUMNS * TB];
  UNROLL
  for (int i = 0; i < COLUMNS * TB; i++) {
    const float2 both = products[i / TB / 2 * TB + i % TB];
    s[i] = i / TB % 2 == 0 ? both.x : both.y;
  }
  finish_scores<CODED, ROWS>(s, centres, by, scales, rows, at, start, lane);

  float top[COLUMNS], most = 0.0f;
  bool raised = false;
  UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    top[n] = s[n * TB];
    UNROLL
    for (int t = 1; t < TB; t++)
      top[n] = metal::max(top[n], s[n * TB + t]);
    raised = raised | (top[n] > state.m[n] + MATRIX_SLACK);
  }
  if (CODED && scales.weighted) {
    UNROLL
    for (int t = 0; t < TB; t++) {
      if (!plain)
        weigh[t] = start + matrix_token(row, t) < at.end ? weigh[t] : 0.0f;
      most = metal::max(most, weigh[t]);
    }
    raised = raised | (most > state.unit);
  }
  if (metal::simd_any(raised))
    raise_state<D, ROWS>(state, top, most);

  UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    const float shift = metal::max(state.m[n], ATTENTION_LEAST);  // no weight where nothing is seen
    UNROLL
    for (int t = 0; t < TB; t++) {
      s[n * TB + t] = metal::exp2(s[n * TB + t] - shift);
      state.l[n] += s[n * TB + t];
    }
  }
  if (CODED && scales.weighted) {
    UNROLL
    for (int t = 0; t < TB; t++) {
      const float w = weigh[t] * state.inverse;  // weights go through 16 bits: kept near 1
      UNROLL
      for (int n = 0; n < COLUMNS; n++)
        s[n * TB + t] *= w;
    }
  }
  if (ROWS == 4) {
    typename MatrixTypes<T>::pair pt[2 * TB];
    UNROLL
    for (int t = 0; t < TB; t++)
      matrix_right_paired(pt + 2 * t, s[t], lane);
    paired_values<T, CODED, D, CODE>(state.out, pt, value_words, values, last, lane);
  } else {
    typename MatrixTypes<T>::pair pt[BANDS * TB];
    UNROLL
    for (int nb = 0; nb < BANDS; nb++) {
      UNROLL
      for (int t = 0; t < TB; t++)
        pt[nb * TB + t] = matrix_right(
            matrix_pair(T(s[2 * nb * TB + t]), T(s[(COLUMNS > 1 ? 2 * nb + 1 : 0) * TB + t])));
    }
    FOR_SIDE_CODE(CODE, values.bits,
                  matrix_values<T, CODED, D, SIDE_CODE, BANDS, LATE>(state.out, pt, value_words,
                                                                     values, last, lane))
  }
}

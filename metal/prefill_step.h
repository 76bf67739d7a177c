// Softmax of a tile of tokens for the 16 query rows of a simdgroup. See attention_prefill.h.
#pragma once

#include "matrix_step.h"
#include "prefill_tile.h"

// Steps whose centres are multiplied at once.
#define PREFILL_CENTRES 8
// Factors of scores are no less, so that a hidden score times one still has no weight.
#define PREFILL_LEAST_FACTOR 1.0e-20f

// A lane holds scores and outputs of two rows, i = 0, 1: 8 i + matrix_row(lane) of its simdgroup.
template <int D>
struct PrefillState {
  float2 out[D / 4];
  float m[2], l[2];  // m: before the factor; l: of this lane's tokens only
  // Weights go through 16 bits after the scales of their values: they are relative to the largest
  // of these besides m, by its logarithm.
  float largest, unit;
};

struct PrefillRows {
  int sinks[2], first[2], last[2];
  float factor[2];  // of the scores
  bool plain;       // for the simdgroup: all rows see all tokens of the step
};

struct PrefillTurn {
  int base, start;  // the first token of the step, and of what was read
  int end;          // tokens that some row of the threadgroup sees
};

template <int D>
METAL_FUNC void start_prefill(thread PrefillState<D>& state) {
  UNROLL
  for (int i = 0; i < D / 4; i++)
    state.out[i] = float2(0.0f, 0.0f);
  UNROLL
  for (int i = 0; i < 2; i++) {
    state.m[i] = ATTENTION_NEVER;
    state.l[i] = 0.0f;
  }
  state.largest = state.unit = 0.0f;
}

// c[i]: products of row i with the centres of steps column and column + 1, from block `first` on.
template <typename T, int D>
METAL_FUNC void prefill_centres(thread float2* c, thread const typename MatrixTypes<T>::pair* qf,
                                MatrixScales scales, int first, int last, uint lane) {
  const int index = metal::min(first + int(matrix_row(lane)), last) * TILE_ROWS / scales.block;
  device const char2* at =
      (device const char2*)(scales.centres + long(index) * D + int(matrix_column(lane)));
  c[0] = c[1] = float2(0.0f, 0.0f);
  UNROLL
  for (int k = 0; k < D / 16; k++) {
    typename MatrixTypes<T>::pair right[2];
    UNROLL
    for (int j = 0; j < 2; j++) {
      const char2 x = at[8 * k + 4 * j];
      right[j] = matrix_right_transposed(matrix_rounded<T>(float(x.x), float(x.y)), lane);
    }
    matrix_multiply_add(c, qf + 4 * k, right);
  }
  // a lane's columns are other lanes' rows
  const float unit = float(scales.centre_scales[index]);
  const int column = int(matrix_column(lane));
  const float2 units =
      float2(metal::simd_shuffle(unit, ushort(matrix_lane(uint(column), 0u))),
             metal::simd_shuffle(unit, ushort(matrix_lane(uint(column) + 1u, 0u))));
  c[0] = c[0] * units;
  c[1] = c[1] * units;
}

// Scores times the scales of their tokens, with centres; hidden ones NEVER.
template <bool CODED>
METAL_FUNC void prefill_scores(thread float2* s, thread const float2* centres, uint key_scales,
                               MatrixScales scales, PrefillRows rows, PrefillTurn at, uint lane) {
  const int column = int(matrix_column(lane));
  if (CODED && (scales.scaled || scales.centred)) {
    float centre[2] = {0.0f, 0.0f};
    if (scales.centred) {
      const int turn = at.base / TILE_ROWS % PREFILL_CENTRES;
      UNROLL
      for (int i = 0; i < 2; i++)
        centre[i] = metal::simd_shuffle(turn % 2 == 0 ? centres[i].x : centres[i].y,
                                        ushort(matrix_lane(matrix_row(lane), uint(turn))));
    }
    UNROLL
    for (int n = 0; n < TILE_ROWS / 8; n++) {
      const float2 by = pair_scales(metal::simd_shuffle(key_scales, ushort(4 * n + column / 2)));
      UNROLL
      for (int i = 0; i < 2; i++)
        s[2 * n + i] = float2(metal::fma(s[2 * n + i].x, by.x, centre[i]),
                              metal::fma(s[2 * n + i].y, by.y, centre[i]));
    }
  }
  if (rows.plain)
    return;
  UNROLL
  for (int i = 0; i < 2; i++) {
    const int sinks = rows.sinks[i], last = rows.last[i];
    const int first = metal::max(rows.first[i], at.base);
    UNROLL
    for (int n = 0; n < TILE_ROWS / 8; n++) {
      const int slot = at.start + 8 * n + column, next = slot + 1;
      const bool x = (slot < sinks) | ((slot >= first) & (slot < last));
      const bool y = (next < sinks) | ((next >= first) & (next < last));
      s[2 * n + i] =
          float2(x ? s[2 * n + i].x : ATTENTION_NEVER, y ? s[2 * n + i].y : ATTENTION_NEVER);
    }
  }
}

// Raises the references of weights and the unit of the values to what a step has.
template <int D>
METAL_FUNC void raise_prefill(thread PrefillState<D>& state, thread const float* top,
                              thread const float* factor, bool weighted, float most) {
  const float before = state.unit;
  if (weighted) {
    state.largest = metal::max(state.largest, metal::simd_max(most));
    state.unit = metal::log2(metal::clamp(state.largest, 1.0e-18f, 1.0e18f));
  }
  UNROLL
  for (int i = 0; i < 2; i++) {
    const float m = metal::max(state.m[i], matrix_max_columns(top[i]));
    const float shrink = metal::exp2(metal::fma(state.m[i] - m, factor[i], before - state.unit));
    state.m[i] = m;
    state.l[i] *= shrink;
    UNROLL
    for (int n = 0; n < D / 8; n++)
      state.out[2 * n + i] = state.out[2 * n + i] * shrink;
  }
}

// Scores to weights, the left matrices of the product with values.
template <typename T, bool CODED, int D>
METAL_FUNC void prefill_weights(thread typename MatrixTypes<T>::pair* p,
                                thread PrefillState<D>& state, thread float2* s, uint value_scales,
                                MatrixScales scales, PrefillRows rows, PrefillTurn at, uint lane) {
  constexpr int N = TILE_ROWS / 8;
  float top[2], most = 0.0f;
  bool raised = false;
  UNROLL
  for (int i = 0; i < 2; i++) {
    top[i] = metal::max(s[i].x, s[i].y);
    UNROLL
    for (int n = 1; n < N; n++)
      top[i] = metal::max(top[i], metal::max(s[2 * n + i].x, s[2 * n + i].y));
    raised = raised | ((top[i] - state.m[i]) * rows.factor[i] > MATRIX_SLACK);
  }
  const bool weighted = CODED && scales.weighted;
  if (weighted) {
    const int seen = at.end - at.start - 2 * (int(lane) % (TILE_ROWS / 2));
    value_scales = seen >= 2 ? value_scales : seen == 1 ? value_scales & 0xffffu : 0u;
    const float2 both = pair_scales(value_scales);
    most = metal::max(both.x, both.y);
    raised = raised | (most > state.largest);
  }
  if (metal::simd_any(raised))
    raise_prefill<D>(state, top, rows.factor, weighted, most);

  UNROLL
  for (int i = 0; i < 2; i++) {
    const float factor = rows.factor[i];
    // no weight where nothing is seen
    const float shift =
        state.m[i] > ATTENTION_LEAST ? metal::fma(state.m[i], factor, state.unit) : 0.0f;
    UNROLL
    for (int n = 0; n < N; n++) {
      const float2 w = float2(metal::exp2(metal::fma(s[2 * n + i].x, factor, -shift)),
                              metal::exp2(metal::fma(s[2 * n + i].y, factor, -shift)));
      state.l[i] += w.x + w.y;
      s[2 * n + i] = w;
    }
  }
  if (weighted) {
    UNROLL
    for (int n = 0; n < N; n++) {
      const float2 by = pair_scales(
          metal::simd_shuffle(value_scales, ushort(4 * n + int(matrix_column(lane)) / 2)));
      s[2 * n] = s[2 * n] * by;
      s[2 * n + 1] = s[2 * n + 1] * by;
    }
  }
  UNROLL
  for (int n = 0; n < N; n++) {
    UNROLL
    for (int i = 0; i < 2; i++)
      p[n / 2 * 4 + 2 * i + n % 2] = matrix_rounded<T>(s[2 * n + i].x, s[2 * n + i].y);
  }
}

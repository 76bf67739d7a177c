// Softmax of a tile of tokens for the 16 query rows of a simdgroup. See attention_prefill.h.
#pragma once

#include "matrix_step.h"
#include "prefill_tile.h"

// Factors of scores are no less, so that a hidden score times one still has no weight.
#define PREFILL_LEAST_FACTOR 1.0e-20f

// A lane holds scores and outputs of two rows, i = 0, 1: 8 i + matrix_row(lane) of its simdgroup.
template <int D>
struct PrefillState {
  float2 out[D / 4];  // counts in the unit of the values
  float m[2], l[2];   // m: reference of weights, a logarithm; l: of this lane's tokens only
};

// The first query row of a simdgroup, one of `rows` of a kv head.
struct PrefillPlace {
  int b, row, rows;
};

struct PrefillTurn {
  int base, start;  // the first token of the step, and of what was read
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
}

// What the scores of a step are to be multiplied by; relative: decoded keys are, to the unit of
// `exponent`.
METAL_FUNC void step_factors(thread float* factor, thread const float* row_factor, bool relative,
                             uint exponent) {
  UNROLL
  for (int i = 0; i < 2; i++)
    factor[i] = relative ? metal::max(row_factor[i] * unit_value(exponent), PREFILL_LEAST_FACTOR)
                         : row_factor[i];
}

// Scores of tokens that a row does not see become NEVER.
METAL_FUNC void hide_scores(thread float2* s, constant AttentionParams& p, device const int* layout,
                            PrefillPlace place, PrefillTurn at, bool body, uint lane) {
  const int column = int(matrix_column(lane));
  UNROLL
  for (int i = 0; i < 2; i++) {
    const int r = metal::min(place.row + 8 * i + int(matrix_row(lane)), place.rows - 1);
    const RowView v = row_view(p, layout, place.b, r % p.queries, body);
    const int sinks = v.sinks, last = v.last, first = metal::max(v.first, at.base);
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

// Scores, which are yet to be multiplied by `factor`, to weights. shrink: what outputs so far are
// to be multiplied by; whether some of the simdgroup's are.
template <int D>
METAL_FUNC bool prefill_weights(thread float2* s, thread float* shrink,
                                thread PrefillState<D>& state, thread const float* factor) {
  constexpr int N = TILE_ROWS / 8;
  float top[2];
  bool raised = false;
  UNROLL
  for (int i = 0; i < 2; i++) {
    top[i] = metal::max(s[i].x, s[i].y);
    UNROLL
    for (int n = 1; n < N; n++)
      top[i] = metal::max(top[i], metal::max(s[2 * n + i].x, s[2 * n + i].y));
    top[i] = top[i] > ATTENTION_LEAST ? top[i] * factor[i] : ATTENTION_NEVER;
    raised = raised | (top[i] > state.m[i] + MATRIX_SLACK);
    shrink[i] = 1.0f;
  }
  raised = metal::simd_any(raised);
  if (raised) {
    UNROLL
    for (int i = 0; i < 2; i++) {
      const float m = metal::max(state.m[i], matrix_max_columns(top[i]));
      shrink[i] = metal::exp2(state.m[i] - m);
      state.m[i] = m;
      state.l[i] *= shrink[i];
    }
  }
  UNROLL
  for (int i = 0; i < 2; i++) {
    // no weight where nothing is seen
    const float shift = state.m[i] > ATTENTION_LEAST ? -state.m[i] : 0.0f;
    float sum = 0.0f;
    UNROLL
    for (int n = 0; n < N; n++) {
      const float2 w = float2(metal::exp2(metal::fma(s[2 * n + i].x, factor[i], shift)),
                              metal::exp2(metal::fma(s[2 * n + i].y, factor[i], shift)));
      sum += w.x + w.y;
      s[2 * n + i] = w;
    }
    state.l[i] += sum;
  }
  return raised;
}

// Weights as the left matrices of the product with values.
template <typename T>
METAL_FUNC void round_weights(thread typename MatrixTypes<T>::pair* p, thread const float2* s) {
  UNROLL
  for (int n = 0; n < TILE_ROWS / 8; n++) {
    UNROLL
    for (int i = 0; i < 2; i++)
      p[n / 2 * 4 + 2 * i + n % 2] = matrix_rounded<T>(s[2 * n + i].x, s[2 * n + i].y);
  }
}

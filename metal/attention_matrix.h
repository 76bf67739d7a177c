// Attention over byte codes and a 16-bit tail by matrices of a simdgroup. Host side:
// csrc/attention/launch.cpp.
//
// Scores are S^T = K Q^T and outputs O^T = V^T P^T: codes become left matrices in registers, and
// what S^T is turned into stands on the right of the next product, so decoded tokens never go
// through threadgroup memory. The order of the channels in a product is free: a lane takes
// neighbouring ones, a quarter of a key and an eighth of a value, so it reads neighbouring codes.
#pragma once

#include "attention.h"
#include "hadamard.h"
#include "matrix_tokens.h"

// What a simdgroup has of its query rows: lanes hold columns (rows of the call) in pairs.
template <int D, int NB>
struct MatrixState {
  float2 out[NB * (D / 8)];
  float m[2 * NB], l[2 * NB];  // l: of this lane's tokens only
  float unit;                  // of the scales of the values: out counts in it
};

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
  bool scaled, weighted, centred;
};

// One step: MATRIX_TOKENS tokens from `base` on, whose key codes are `words`; the codes of those
// from `next` on, if there are any, take their place. `plain`: every row sees all of the tokens.
template <typename T, bool CODED, int D, int DIMS, int NB>
METAL_FUNC void matrix_step(thread MatrixState<D, NB>& state,
                            thread const typename MatrixTypes<T>::pair* qf, thread uint* words,
                            MatrixSide<T> keys, MatrixSide<T> values, MatrixScales scales,
                            MatrixRows rows, int base, int next, int end, int block, bool plain,
                            uint lane) {
  constexpr int TB = MATRIX_TOKENS / 8;
  const int row = int(matrix_row(lane)), column = int(matrix_column(lane));
  const int last = end - 1 - base;
  uint value_words[4 * MATRIX_PAIRS * MATRIX_WORDS(CODED, D / 8, DIMS)];
  values = from_token<T, D, DIMS>(values, base);
  if (CODED)
    load_values<D, DIMS>(value_words, values.codes, last, lane);
  float2 st[NB * TB];
  UNROLL
  for (int i = 0; i < NB * TB; i++)
    st[i] = float2(0.0f, 0.0f);
  matrix_scores<T, CODED, D, DIMS, NB>(st, qf, words, from_token<T, D, DIMS>(keys, base), last,
                                       lane);
  if (CODED && next < end)
    load_keys<D, DIMS>(words, keys.codes + long(next) * (D / DIMS), end - 1 - next, lane);

  float weigh[TB];
  float most = 0.0f;
  if (CODED) {
    UNROLL
    for (int t = 0; t < TB; t++) {
      const int token = metal::min(base + 8 * t + row, end - 1);
      const float by = scales.scaled ? float(scales.keys[token]) : 1.0f;
      weigh[t] = scales.weighted ? float(scales.values[token]) : 1.0f;
      most = metal::max(most, weigh[t]);
      UNROLL
      for (int nb = 0; nb < NB; nb++)
        st[nb * TB + t] = st[nb * TB + t] * by;
    }
    if (scales.centred) {
      // the centre as a token: one row of the left matrix, so one row of the result
      float2 ct[2 * NB];
      UNROLL
      for (int i = 0; i < 2 * NB; i++)
        ct[i] = float2(0.0f, 0.0f);
      device const char* centre = scales.centres + long(base / block) * D + column / 2 * (D / 4);
      UNROLL
      for (int k = 0; k < D / 16; k++) {
        typename MatrixTypes<T>::pair left[4];
        char4 c = char4(0, 0, 0, 0);
        if (row == 0)
          c = ((device const char4*)centre)[k];
        left[0] = matrix_pair(T(float(c.x)), T(float(c.y)));
        left[1] = matrix_pair(T(float(c.z)), T(float(c.w)));
        left[2] = matrix_pair(T(0.0f), T(0.0f));
        left[3] = left[2];
        UNROLL
        for (int nb = 0; nb < NB; nb++)
          matrix_multiply_add(ct + 2 * nb, left, qf + (nb * (D / 16) + k) * 2);
      }
      const float unit = float(scales.centre_scales[base / block]);
      UNROLL
      for (int nb = 0; nb < NB; nb++) {
        const float2 c =
            float2(matrix_sum_rows(ct[2 * nb].x) * unit, matrix_sum_rows(ct[2 * nb].y) * unit);
        UNROLL
        for (int t = 0; t < TB; t++)
          st[nb * TB + t] = st[nb * TB + t] + c;
      }
    }
  }

  // weights, and what the running sums are to be multiplied by
  float factor[2 * NB], shrink[2 * NB];
  bool grown = false;
  UNROLL
  for (int n = 0; n < 2 * NB; n++)
    factor[n] = rows.scale[n / 2 * 8 + column + n % 2];
  if (!plain) {
    UNROLL
    for (int n = 0; n < 2 * NB; n++) {
      const int r = n / 2 * 8 + column + n % 2;
      const int sinks = rows.sinks[r], first = rows.first[r], last = rows.last[r];
      UNROLL
      for (int t = 0; t < TB; t++) {
        const int slot = base + 8 * t + row;
        const bool visible = (slot < sinks) | ((slot >= first) & (slot < last));
        if (n % 2 == 0)
          st[n / 2 * TB + t].x = visible ? st[n / 2 * TB + t].x * factor[n] : ATTENTION_NEVER;
        else
          st[n / 2 * TB + t].y = visible ? st[n / 2 * TB + t].y * factor[n] : ATTENTION_NEVER;
      }
      factor[n] = 1.0f;
    }
  }
  UNROLL
  for (int n = 0; n < 2 * NB; n++) {
    float top = n % 2 == 0 ? st[n / 2 * TB].x : st[n / 2 * TB].y;
    UNROLL
    for (int t = 1; t < TB; t++)
      top = metal::max(top, n % 2 == 0 ? st[n / 2 * TB + t].x : st[n / 2 * TB + t].y);
    const float m = metal::max(state.m[n], matrix_max_rows(top) * factor[n]);
    shrink[n] = metal::exp2(state.m[n] - m);
    grown = grown | (m > state.m[n]);
    state.m[n] = m;
    const float shift = -metal::max(m, ATTENTION_LEAST);  // a row that sees nothing gets no weight
    float sum = 0.0f;
    UNROLL
    for (int t = 0; t < TB; t++) {
      const float s = n % 2 == 0 ? st[n / 2 * TB + t].x : st[n / 2 * TB + t].y;
      const float w = metal::exp2(metal::fma(s, factor[n], shift));
      sum += w;
      if (n % 2 == 0)
        st[n / 2 * TB + t].x = w;
      else
        st[n / 2 * TB + t].y = w;
    }
    state.l[n] = metal::fma(state.l[n], shrink[n], sum);
  }
  float unit = state.unit;
  if (CODED && scales.weighted) {
    // weights times scales go through 16 bits: kept near 1
    unit = metal::max(unit, matrix_max_rows(most));
    const float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
    UNROLL
    for (int t = 0; t < TB; t++)
      weigh[t] = base + 8 * t + row < end ? weigh[t] * inverse : 0.0f;
  }
  if (metal::simd_any(grown || unit > state.unit)) {
    const float by = unit > state.unit ? state.unit / unit : 1.0f;
    UNROLL
    for (int nb = 0; nb < NB; nb++) {
      const float2 factor = float2(shrink[2 * nb] * by, shrink[2 * nb + 1] * by);
      UNROLL
      for (int i = 0; i < D / 8; i++)
        state.out[nb * (D / 8) + i] = state.out[nb * (D / 8) + i] * factor;
    }
    state.unit = unit;
  }
  typename MatrixTypes<T>::pair pt[NB * TB];
  UNROLL
  for (int nb = 0; nb < NB; nb++) {
    UNROLL
    for (int t = 0; t < TB; t++) {
      float2 w = st[nb * TB + t];
      if (CODED && scales.weighted)
        w = w * weigh[t];
      pt[nb * TB + t] = matrix_right(matrix_pair(T(w.x), T(w.y)));
    }
  }
  matrix_values<T, CODED, D, DIMS, NB>(state.out, pt, value_words, values, last, lane);
}

// The query rows of a tile as right matrices, from threadgroup memory.
template <typename T, int D, int NB>
METAL_FUNC void matrix_queries(thread typename MatrixTypes<T>::pair* qf, threadgroup const T* q,
                               uint lane) {
  const int row = int(matrix_row(lane)), column = int(matrix_column(lane));
  UNROLL
  for (int nb = 0; nb < NB; nb++) {
    UNROLL
    for (int i = 0; i < D / 8; i++) {
      // matrix i of step i / 2: its row 2 c + e is channel e of the pair at 2 i of quarter c
      const int channel = row / 2 * (D / 4) + 2 * i + row % 2;
      threadgroup const T* at = q + (8 * nb + column) * D + channel;
      qf[nb * (D / 8) + i] = matrix_right(matrix_pair(at[0], at[D]));
    }
  }
}

// The blocks of a slice: simdgroups take them in turn.
template <typename T, bool CODED, int D, int DIMS, int NB>
METAL_FUNC void matrix_slice(thread MatrixState<D, NB>& state, threadgroup const T* q,
                             MatrixSide<T> keys, MatrixSide<T> values, MatrixScales scales,
                             MatrixRows rows, int slice, int slices, int block, uint lane,
                             uint sg) {
  typename MatrixTypes<T>::pair qf[NB * (D / 8)];
  matrix_queries<T, D, NB>(qf, q, lane);
  int end = 0, sinks = 0, all_first = 0, all_last = rows.last[0], any_first = rows.first[0];
  for (int r = 0; r < 8 * NB; r++) {
    end = metal::max(end, metal::max(rows.sinks[r], rows.last[r]));
    sinks = metal::max(sinks, rows.sinks[r]);
    all_first = metal::max(all_first, rows.first[r]);
    any_first = metal::min(any_first, rows.first[r]);
    all_last = metal::min(all_last, rows.last[r]);
  }
  const int blocks = (end + MATRIX_TOKENS - 1) / MATRIX_TOKENS;
  const int share = (blocks + slices - 1) / slices;
  const int to = metal::min((slice + 1) * share, blocks);
  uint words[2 * MATRIX_PAIRS * MATRIX_WORDS(CODED, D / 4, DIMS)];
  int i = slice * share + int(sg);
  if (CODED && i < to) {
    const long base = long(i) * MATRIX_TOKENS;
    load_keys<D, DIMS>(words, keys.codes + base * (D / DIMS), end - 1 - int(base), lane);
  }
  for (; i < to; i += ATTENTION_SIMDS) {
    const int base = i * MATRIX_TOKENS;
    if (!CODED && base >= sinks && base + MATRIX_TOKENS <= any_first)
      continue;
    const bool plain = base >= all_first && base + MATRIX_TOKENS <= all_last;
    const int next = i + ATTENTION_SIMDS < to ? base + ATTENTION_SIMDS * MATRIX_TOKENS : end;
    matrix_step<T, CODED, D, DIMS, NB>(state, qf, words, keys, values, scales, rows, base, next,
                                       end, block, plain, lane);
  }
}

// Grid and outputs as for attention_tile, with tiles of 8 NB rows.
template <typename T, int D, int DIMS, int NB>
kernel void attention_matrix(
    device const T* q [[buffer(0)]], device const float* q_code [[buffer(1)]],
    device const int* layout [[buffer(2)]], device const T* k_tail [[buffer(3)]],
    device const T* v_tail [[buffer(4)]], device const uchar* k_codes [[buffer(5)]],
    device const float* k_table [[buffer(6)]], device const uchar* k_scales [[buffer(7)]],
    device const uchar* k_centres [[buffer(8)]], device const uchar* k_centre_scales [[buffer(9)]],
    device const uchar* pair_codes [[buffer(10)]], device const float* pair_table [[buffer(11)]],
    device const uchar* pair_scales [[buffer(12)]], device const uchar* v_codes [[buffer(13)]],
    device const float* v_table [[buffer(14)]], device const uchar* v_scales [[buffer(15)]],
    device const uchar* v_centres [[buffer(16)]],
    device const uchar* v_centre_scales [[buffer(17)]], device const uchar* mask [[buffer(18)]],
    device const float* key_diagonal [[buffer(19)]],
    device float* part [[buffer(20)]],     // [rows, slices, Dv]: sums of weighted values
    device float* part_ml [[buffer(21)]],  // [rows, slices, 2]: maximum and sum of weights
    constant AttentionParams& p [[buffer(22)]], uint3 tgid [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int ROWS = 8 * NB, TABLE = 256 * DIMS * MATRIX_COPIES(DIMS);
  constexpr int FLOATS = ROWS * D > TABLE ? ROWS * D : TABLE;
  constexpr int TABLE_SHARE = 256 * DIMS / ATTENTION_THREADS;
  threadgroup_array(float, memory, FLOATS);  // tables, then outputs
  threadgroup_array(ushort, query, ROWS * D);
  threadgroup_array(int, row_sinks, ROWS);
  threadgroup_array(int, row_first, ROWS);
  threadgroup_array(int, row_last, ROWS);
  threadgroup_array(float, row_scale, ROWS);
  threadgroup_array(float, sums, 2 * ATTENTION_SIMDS * ROWS);

  const int rows = p.heads / p.kv_heads * p.queries;
  const int row0 = int(tgid.x) * ROWS;
  const long bh = tgid.y;
  const int b = int(bh) / p.kv_heads, h = int(bh) % p.kv_heads;
  const bool body = int(tgid.z) < p.splits;

  for (int r = int(tid); r < ROWS; r += ATTENTION_THREADS) {
    const int last_row = metal::min(row0 + r, rows - 1);  // rows beyond give nothing
    const RowView v = row_view(p, layout, b, last_row % p.queries, body);
    row_sinks[r] = v.sinks;
    row_first[r] = v.first;
    row_last[r] = metal::max(v.last, 0);
    if (!body)
      row_scale[r] = p.scale;
  }
  // every table value is on its way while the queries are prepared
  float table_values[2 * TABLE_SHARE];
  device const float* k_rows = k_table + (p.key.per_head ? h * 256 * DIMS : 0);
  device const float* v_rows = v_table + (p.value.per_head ? h * 256 * DIMS : 0);
  UNROLL
  for (int i = 0; i < TABLE_SHARE; i++) {
    table_values[2 * i] = k_rows[int(tid) + i * ATTENTION_THREADS];
    table_values[2 * i + 1] = v_rows[int(tid) + i * ATTENTION_THREADS];
  }
  const bool turned = body && p.key_basis.order > 0;
  device const float* diagonal = key_diagonal + (p.key_basis.per_head ? h * D : 0);
  for (int r = int(sg); r < ROWS; r += ATTENTION_SIMDS) {
    const long from = query_row(p, b, h, metal::min(row0 + r, rows - 1)) * D;
    if (!body) {
      for (int d = int(lane); d < D; d += 32)
        ((threadgroup T*)query)[r * D + d] = q[from + d];
      continue;
    }
    float v[D / 32], most = 0.0f;
    UNROLL
    for (int i = 0; i < D / 32; i++) {
      const int d = 32 * i + int(lane);
      v[i] = turned ? float(q[from + d]) * diagonal[d] : q_code[from + d];
    }
    if (turned)
      hadamard_transform<D, 1>(v, lane, false, p.key_basis.scale);
    UNROLL
    for (int i = 0; i < D / 32; i++)
      most = metal::max(most, metal::abs(v[i]));
    most = metal::simd_max(most);  // 16 bits hold a row relative to its largest value
    const float by = most > 0.0f ? 1.0f / most : 0.0f;
    UNROLL
    for (int i = 0; i < D / 32; i++)
      ((threadgroup half*)query)[r * D + 32 * i + int(lane)] = half(v[i] * by);
    if (lane == 0)
      row_scale[r] = p.scale * most;
  }
  threadgroup half* table = (threadgroup half*)memory;
  UNROLL
  for (int i = 0; i < TABLE_SHARE; i++) {
    const int at = int(tid) + i * ATTENTION_THREADS;
    threadgroup half* to = table + at / DIMS * MATRIX_COPIES(DIMS) * DIMS + at % DIMS;
    UNROLL
    for (int c = 0; c < MATRIX_COPIES(DIMS); c++) {
      to[c * DIMS] = half(table_values[2 * i]);
      to[TABLE + c * DIMS] = half(table_values[2 * i + 1]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  MatrixState<D, NB> state;
  UNROLL
  for (int i = 0; i < NB * (D / 8); i++)
    state.out[i] = float2(0.0f, 0.0f);
  UNROLL
  for (int n = 0; n < 2 * NB; n++) {
    state.m[n] = ATTENTION_NEVER;
    state.l[n] = 0.0f;
  }
  state.unit = 0.0f;
  MatrixRows view;
  view.sinks = row_sinks;
  view.first = row_first;
  view.last = row_last;
  view.scale = row_scale;
  MatrixScales scales;
  const long blocks = (p.body + p.block - 1) / p.block;
  scales.scaled = p.key.scaled != 0;
  scales.weighted = p.value.scaled != 0;
  scales.centred = p.key.centred != 0;
  scales.keys = (device const bfloat*)k_scales + bh * p.body;
  scales.values = (device const bfloat*)v_scales + bh * p.body;
  scales.centres = (device const char*)k_centres + bh * blocks * D;
  scales.centre_scales = (device const bfloat*)k_centre_scales + bh * blocks;
  if (body) {
    MatrixSide<half> keys, values;
    keys.codes = k_codes + bh * p.body * p.key.bytes;
    keys.table = (threadgroup const uchar*)table + lane % MATRIX_COPIES(DIMS) * (2 * DIMS);
    keys.vectors = (device const half*)k_codes;
    values.codes = v_codes + bh * p.body * p.value.bytes;
    values.table = keys.table + 2 * TABLE;
    values.vectors = keys.vectors;
    matrix_slice<half, true, D, DIMS, NB>(state, (threadgroup half*)query, keys, values, scales,
                                          view, int(tgid.z), p.splits, p.block, lane, sg);
  } else {
    MatrixSide<T> keys, values;
    keys.codes = k_codes;
    keys.table = (threadgroup const uchar*)memory;
    keys.vectors = k_tail + bh * p.tail * D;
    values.codes = v_codes;
    values.table = keys.table;
    values.vectors = v_tail + bh * p.tail * D;
    scales.scaled = scales.weighted = scales.centred = false;
    matrix_slice<T, false, D, DIMS, NB>(state, (threadgroup T*)query, keys, values, scales, view,
                                        int(tgid.z) - p.splits, p.tail_splits, p.block, lane, sg);
  }

  // merge the simdgroups
  const int row = int(matrix_row(lane)), column = int(matrix_column(lane));
  UNROLL
  for (int n = 0; n < 2 * NB; n++) {
    const float l = matrix_sum_rows(state.l[n]);
    const int r = n / 2 * 8 + column + n % 2;
    if (row == 0) {
      sums[(int(sg) * ROWS + r) * 2] = state.m[n];
      sums[(int(sg) * ROWS + r) * 2 + 1] = l;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float unit = body && p.value.scaled ? state.unit : 1.0f;
  for (int turn = 0; turn < ATTENTION_SIMDS; turn++) {
    if (int(sg) == turn) {
      UNROLL
      for (int n = 0; n < 2 * NB; n++) {
        const int r = n / 2 * 8 + column + n % 2;
        float top = ATTENTION_NEVER;
        for (int k = 0; k < ATTENTION_SIMDS; k++)
          top = metal::max(top, sums[(k * ROWS + r) * 2]);
        const float by = metal::exp2(state.m[n] - top) * unit;
        UNROLL
        for (int i = 0; i < D / 8; i++) {
          const float2 x = state.out[n / 2 * (D / 8) + i];
          // matrices 2 j and 2 j + 1 are channels 2 j and 2 j + 1 of every eighth
          threadgroup float* to = memory + r * D + row * (D / 8) + i;
          to[0] = (turn == 0 ? 0.0f : to[0]) + (n % 2 == 0 ? x.x : x.y) * by;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const int all = p.splits + p.tail_splits;
  for (int i = int(tid); i < ROWS * D; i += ATTENTION_THREADS) {
    const int r = row0 + i / D;
    if (r < rows) {
      const long at = query_row(p, b, h, r);
      part[(at * all + tgid.z) * D + i % D] = memory[i];
    }
  }
  for (int i = int(tid); i < ROWS; i += ATTENTION_THREADS) {
    const int r = row0 + i;
    if (r < rows) {
      float top = ATTENTION_NEVER, l = 0.0f;
      for (int k = 0; k < ATTENTION_SIMDS; k++)
        top = metal::max(top, sums[(k * ROWS + i) * 2]);
      for (int k = 0; k < ATTENTION_SIMDS; k++)
        l += sums[(k * ROWS + i) * 2 + 1] * metal::exp2(sums[(k * ROWS + i) * 2] - top);
      const long at = query_row(p, b, h, r);
      part_ml[(at * all + tgid.z) * 2] = top;
      part_ml[(at * all + tgid.z) * 2 + 1] = l;
    }
  }
}

// Attention over codes of bytes or trellises and a 16-bit tail by matrices of a simdgroup. Host
// side: csrc/attention/launch.cpp.
//
// Scores are S^T = K Q^T and outputs O^T = V^T P^T: codes become left matrices in registers, and
// what S^T is turned into stands on the right of the next product, so decoded tokens never go
// through threadgroup memory. The order of the channels in a product is free: a lane takes
// neighbouring ones, a quarter of a key and an eighth of a value, so it reads neighbouring codes.
#pragma once

#include "matrix_inputs.h"

// The query rows of a tile as right matrices, from threadgroup memory.
template <typename T, int D, int ROWS>
METAL_FUNC void matrix_queries(thread typename MatrixTypes<T>::pair* qf, threadgroup const T* q,
                               uint lane) {
  UNROLL
  for (int nb = 0; nb < MATRIX_BANDS(ROWS); nb++) {
    UNROLL
    for (int i = 0; i < D / 8; i++)
      qf[nb * (D / 8) + i] = matrix_query<T, D, ROWS>(q, nb, i, lane);
  }
}

// The blocks of a slice: simdgroups take them in turn.
template <typename T, bool CODED, int D, int CODE, int ROWS>
METAL_FUNC void matrix_slice(thread MatrixState<D, ROWS>& state, threadgroup const T* q,
                             MatrixSide<T> keys, MatrixSide<T> values, MatrixScales scales,
                             MatrixRows rows, int slice, int slices, uint lane, uint sg) {
  typename MatrixTypes<T>::pair qf[MATRIX_BANDS(ROWS) * (D / 8)];
  matrix_queries<T, D, ROWS>(qf, q, lane);
  int end = 0, sinks = 0, all_first = 0, all_last = rows.last[0], any_first = rows.first[0];
  for (int r = 0; r < ROWS; r++) {
    end = metal::max(end, metal::max(rows.sinks[r], rows.last[r]));
    sinks = metal::max(sinks, rows.sinks[r]);
    all_first = metal::max(all_first, rows.first[r]);
    any_first = metal::min(any_first, rows.first[r]);
    all_last = metal::min(all_last, rows.last[r]);
  }
  const int blocks = (end + MATRIX_TOKENS - 1) / MATRIX_TOKENS;
  const int share = (blocks + slices - 1) / slices;
  const int to = metal::min((slice + 1) * share, blocks);
  uint words[(MATRIX_TOKENS / 8) * MATRIX_WORDS(CODED, D / 4, CODE)];
  float centres[2 * MATRIX_COLUMNS(ROWS)] = {};
  int i = slice * share + int(sg);
  if (CODED && !MATRIX_LATE(D, CODE, ROWS) && i < to)
    FOR_SIDE_CODE(CODE, keys.bits,
                  load_keys<D, SIDE_CODE, MATRIX_TOKENS / 8>(
                      words, from_block(keys.codes, i, scales, CODE_ROW(SIDE_CODE, D)), 0, lane))
  for (int turn = 0; i < to; i += ATTENTION_SIMDS, turn++) {
    const int base = i * MATRIX_TOKENS;
    if (!CODED && base >= sinks && base + MATRIX_TOKENS <= any_first)
      continue;
    if (CODED && scales.centred && turn % MATRIX_TURNS == 0)
      centre_scores<T, D, ROWS>(centres, qf, q + MATRIX_REST(D, ROWS), scales, i, to - 1, lane);
    MatrixTurn at;
    at.block = i;
    at.next = i + ATTENTION_SIMDS < to ? i + ATTENTION_SIMDS : i;
    at.turn = turn % MATRIX_TURNS;
    at.end = end;
    at.plain = base >= all_first && base + MATRIX_TOKENS <= all_last;
    matrix_step<T, CODED, D, CODE, ROWS>(state, qf, words, centres, keys, values, scales, rows, at,
                                         lane);
  }
}

// Where output i of a lane's row n lies in threadgroup memory: banks differ from lane to lane, and
// from one output to the next.
template <int D>
METAL_FUNC int merged_place(int n, int i, int lane) {
  return (n * (D / 8) + i) * 32 + (lane ^ (i % 32));
}

template <int D>
struct MatrixQueryRow {
  int row;
  METAL_FUNC int at(int d) const { return row * D + d; }
};

// Grid and outputs as for attention_tile, with tiles of ROWS rows.
template <typename T, int D, int CODE, int ROWS>
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
    device float* part_ml [[buffer(21)]],  // [rows, slices, 2]: reference of weights and their sum
    constant AttentionParams& p [[buffer(22)]], uint3 tgid [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup_tables(memory);  // then outputs
  threadgroup_array(ushort, query, ROWS * D + MATRIX_REST(D, ROWS));
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
  }
  if (body)
    fill_tables<CODE, ATTENTION_THREADS>(
        memory, k_table + (p.key.per_head ? h * 256 * CODE_DIMS(CODE) : 0),
        v_table + (p.value.per_head ? h * 256 * CODE_DIMS(CODE) : 0), tid);
  device const float* diagonal = key_diagonal + (p.key_basis.per_head ? h * D : 0);
  for (int r = int(sg); r < ROWS; r += ATTENTION_SIMDS) {
    const long from = query_row(p, b, h, metal::min(row0 + r, rows - 1)) * D;
    MatrixQueryRow<D> to;
    to.row = r;
    const float most = load_query_row<T, D>(query, to, MATRIX_REST(D, ROWS), q, q_code, diagonal,
                                            p.key_basis, from, body, lane);
    if (lane == 0)
      row_scale[r] = p.scale * most;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  MatrixState<D, ROWS> state;
  start_state<D, ROWS>(state);
  MatrixRows view;
  view.sinks = row_sinks;
  view.first = row_first;
  view.last = row_last;
  view.scale = row_scale;
  const MatrixScales scales =
      matrix_scales<D>(p, body, bh, k_scales, v_scales, k_centres, k_centre_scales);
  if (body) {
    const MatrixSides<half> sides = coded_sides<CODE>(p, bh, k_codes, v_codes, memory, lane);
    matrix_slice<half, true, D, CODE, ROWS>(state, (threadgroup half*)query, sides.keys,
                                            sides.values, scales, view, int(tgid.z), p.splits, lane,
                                            sg);
  } else {
    const MatrixSides<T> sides = tail_sides<T, D>(p, bh, k_tail, v_tail, memory);
    matrix_slice<T, false, D, CODE_OF(CODE, 1), ROWS>(
        state, (threadgroup T*)query, sides.keys, sides.values, scales, view,
        int(tgid.z) - p.splits, p.tail_splits, lane, sg);
  }

  // merge the simdgroups, as many at a time as there is memory for
  constexpr int COLUMNS = MATRIX_COLUMNS(ROWS), HELD = ROWS * D;
  constexpr int ROOM = 256 * TABLE_ROW_BYTES / (4 * HELD);
  constexpr int AREAS = ROOM < ATTENTION_SIMDS ? ROOM : ATTENTION_SIMDS;
  UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    const float l = matrix_sum_rows(state.l[n]);
    const int r = matrix_query_row<ROWS>(n, lane);
    if (matrix_row(lane) == 0) {
      sums[(int(sg) * ROWS + r) * 2] = state.m[n];
      sums[(int(sg) * ROWS + r) * 2 + 1] = l;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float unit = body && p.value.scaled ? state.unit : 1.0f;
  threadgroup float* area = (threadgroup float*)memory + int(sg) % AREAS * HELD;
  for (int turn = 0; turn < ATTENTION_SIMDS / AREAS; turn++) {
    if (int(sg) / AREAS == turn) {
      UNROLL
      for (int n = 0; n < COLUMNS; n++) {
        const int r = matrix_query_row<ROWS>(n, lane);
        float top = ATTENTION_NEVER;
        for (int k = 0; k < ATTENTION_SIMDS; k++)
          top = metal::max(top, sums[(k * ROWS + r) * 2]);
        const float by = metal::exp2(state.m[n] - top) * unit;
        UNROLL
        for (int i = 0; i < D / 8; i++) {
          threadgroup float* to = area + merged_place<D>(n, i, int(lane));
          *to = (turn == 0 ? 0.0f : *to) + matrix_output<D, ROWS>(state, n, i) * by;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const int all = p.splits + p.tail_splits;
  for (int i = int(tid); i < HELD; i += ATTENTION_THREADS) {
    const int r = i / D, d = i % D;
    if (row0 + r < rows) {
      const int n = ROWS == 4 ? 0 : r / 8 * 2 + r % 2;
      const int from = merged_place<D>(
          n, d % (D / 8), int(matrix_lane(uint(d / (D / 8)), uint(ROWS == 4 ? 2 * r : r % 8))));
      float sum = 0.0f;
      UNROLL
      for (int k = 0; k < AREAS; k++)
        sum += ((threadgroup float*)memory)[k * HELD + from];
      const long at = query_row(p, b, h, row0 + r);
      part[(at * all + tgid.z) * D + d] = sum;
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

// Code and what it is called, query rows; threadgroups that a core should hold.
#define MATRIX_ROWS(tname, T, D, CODE, code, ROWS, GROUPS)                                       \
  instantiate_kernel_groups(attention_matrix_##tname##_##D##_##code##_##ROWS, ATTENTION_THREADS, \
                            GROUPS, attention_matrix, T, D, CODE, ROWS)

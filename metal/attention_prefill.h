// Attention of many query rows over codes of bytes or trellises and a 16-bit tail, by matrices of a
// simdgroup. Host side: csrc/attention/launch.cpp.
//
// A threadgroup decodes tiles of keys and of values, times the scales of their tokens, into
// threadgroup memory, and its simdgroups, each with 16 query rows, multiply by them: S = Q K^T,
// then O += P V with P as it comes out of S. All simdgroups decode (prefill_slice.h), or some do
// nothing else: half of these keys, half values (prefill_producers.h).
#pragma once

#include "matrix_inputs.h"
#include "prefill_blocks.h"
#include "prefill_step.h"
// cmake/amalgamate.py puts a header in once, so these two include no other that the rest needs
#if TILE_PRODUCERS > 0
#include "prefill_producers.h"
#else
#include "prefill_slice.h"
#endif

template <int D>
struct PrefillQueryRow {
  int row;
  METAL_FUNC int at(int d) const { return tile_query<D>(row, d); }
};

// Grid and outputs as for attention_tile, with tiles of PREFILL_ROWS rows.
template <typename T, int D, int CODE>
kernel void attention_prefill(
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
  // tiles, queries, which may lie in the place of others, the tables and the gates
  threadgroup_bytes(memory, PREFILL_GATES(D) + PREFILL_GATE_BYTES);
  const int all_rows = p.heads / p.kv_heads * p.queries;
  const int row0 = int(tgid.x) * PREFILL_ROWS + 16 * int(sg);
  const long bh = tgid.y;
  const int b = int(bh) / p.kv_heads, h = int(bh) % p.kv_heads;
  const bool body = int(tgid.z) < p.splits;

  PrefillPlace place;
  place.b = b;
  place.row = row0;
  place.rows = all_rows;
  float factor[2];
  factor[0] = factor[1] = p.scale;
  const PrefillSpan all =
      prefill_span(p, layout, b, int(tgid.x) * PREFILL_ROWS, PREFILL_ROWS, all_rows, body);
  const PrefillSpan own = prefill_span(p, layout, b, row0, 16, all_rows, body);

  // rows beyond the last repeat it
  threadgroup ushort* query = (threadgroup ushort*)(memory + PREFILL_QUERIES(D));
  device const float* diagonal = key_diagonal + (p.key_basis.per_head ? h * D : 0);
  for (int r = 0; r < (sg < TILE_SIMDS ? 16 : 0); r++) {
    const long from = query_row(p, b, h, metal::min(row0 + r, all_rows - 1)) * D;
    PrefillQueryRow<D> to;
    to.row = 16 * int(sg) + r;
    const float most =
        load_query_row<T, D>(query, to, 0, q, q_code, diagonal, p.key_basis, from, body, lane);
    UNROLL
    for (int i = 0; i < 2; i++) {
      if (r == 8 * i + int(matrix_row(lane)))
        factor[i] = p.scale * most;
    }
  }
  UNROLL
  for (int i = 0; i < 2; i++)
    factor[i] = metal::max(factor[i], PREFILL_LEAST_FACTOR);
  simdgroup_barrier(mem_flags::mem_threadgroup);

  PrefillState<D> state;
  start_prefill<D>(state);
  float unit;
  const MatrixScales scales =
      matrix_scales<D>(p, body, bh, k_scales, v_scales, k_centres, k_centre_scales);
  threadgroup uchar* tables = memory + PREFILL_TABLES(D);
  device const float* key_table = k_table + (p.key.per_head ? h * 256 * CODE_DIMS(CODE) : 0);
  device const float* value_table = v_table + (p.value.per_head ? h * 256 * CODE_DIMS(CODE) : 0);
#if TILE_PRODUCERS > 0
  const PrefillGates gates = prefill_gates(memory + PREFILL_GATES(D));
  start_gates(gates, tid);
  if (body)
    fill_tables<CODE, PREFILL_THREADS>(tables, key_table, value_table, tid);
  tile_barrier();
  // all lanes have the same: said so that addresses are calculated once for all of them
  const uint role = metal::simd_broadcast(sg, ushort(0));
  if (role >= TILE_SIMDS) {
    producer_registers();
    // the first half decodes keys, the second values
    const int side = int(role - TILE_SIMDS) / (TILE_PRODUCERS / 2);
    const uint of = tid - 32 * TILE_SIMDS - uint(side * PREFILL_DECODERS);
    if (body)
      prefill_produce<half, true, D, CODE>(memory, gates,
                                           coded_sides<CODE>(p, bh, k_codes, v_codes, tables, lane),
                                           scales, all, int(tgid.z), p.splits, side, of, lane);
    else
      prefill_produce<T, false, D, CODE_OF(CODE, 1)>(
          memory, gates, tail_sides<T, D>(p, bh, k_tail, v_tail, tables), scales, all,
          int(tgid.z) - p.splits, p.tail_splits, side, of, lane);
    return;
  }
  consumer_registers();
  if (body) {
    TileQueries<half, D> queries;
    tile_queries<half, D>(queries, (threadgroup const half*)query, sg, lane);
    prefill_consume<half, true, D>(state, unit, queries, memory, gates, scales, p, layout, place,
                                   factor, all, own, int(tgid.z), p.splits, lane);
  } else {
    TileQueries<T, D> queries;
    tile_queries<T, D>(queries, (threadgroup const T*)query, sg, lane);
    prefill_consume<T, false, D>(state, unit, queries, memory, gates, scales, p, layout, place,
                                 factor, all, own, int(tgid.z) - p.splits, p.tail_splits, lane);
  }
#else
  if (body) {
    TileQueries<half, D> queries;
    tile_queries<half, D>(queries, (threadgroup const half*)query, sg, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fill_tables<CODE, PREFILL_THREADS>(tables, key_table, value_table, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const MatrixSides<half> sides = coded_sides<CODE>(p, bh, k_codes, v_codes, tables, lane);
    prefill_slice<half, true, D, CODE>(state, unit, queries, memory, sides.keys, sides.values,
                                       scales, p, layout, place, factor, all, own, int(tgid.z),
                                       p.splits, tid, lane);
  } else {
    TileQueries<T, D> queries;
    tile_queries<T, D>(queries, (threadgroup const T*)query, sg, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const MatrixSides<T> sides = tail_sides<T, D>(p, bh, k_tail, v_tail, tables);
    prefill_slice<T, false, D, CODE_OF(CODE, 1)>(
        state, unit, queries, memory, sides.keys, sides.values, scales, p, layout, place, factor,
        all, own, int(tgid.z) - p.splits, p.tail_splits, tid, lane);
  }
#endif

  UNROLL
  for (int i = 0; i < 2; i++) {
    const float l = matrix_sum_columns(state.l[i]);
    const int r = row0 + 8 * i + int(matrix_row(lane));
    if (r >= all_rows)
      continue;
    const long at = query_row(p, b, h, r) * (p.splits + p.tail_splits) + tgid.z;
    device float* to = part + at * D + int(matrix_column(lane));
    UNROLL
    for (int n = 0; n < D / 8; n++)
      *(device float2*)(to + 8 * n) = state.out[2 * n + i] * unit;
    if (matrix_column(lane) == 0) {
      part_ml[at * 2] = state.m[i];
      part_ml[at * 2 + 1] = l;
    }
  }
}

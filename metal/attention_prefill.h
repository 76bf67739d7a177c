// Attention of many query rows over byte codes and a 16-bit tail, by matrices of a simdgroup. Host
// side: csrc/attention/launch.cpp.
//
// A threadgroup decodes a tile of keys and one of values into threadgroup memory, and all its
// simdgroups, each with 16 query rows in registers, multiply by them: S = Q K^T, then O += P V with
// P as it comes out of S. Values are decoded while scores are multiplied, the keys of the next step
// while values are, and codes are loaded one such phase ahead.
#pragma once

#include "matrix_inputs.h"
#include "prefill_step.h"

// The first row of a simdgroup or a threadgroup and the last, as they see tokens: what lies between
// sees no less than the first and no more than the last.
struct PrefillSpan {
  RowView low, high;
};
METAL_FUNC PrefillSpan prefill_span(constant AttentionParams& p, device const int* layout, int b,
                                    int row, int count, int rows, bool body) {
  const int from = metal::min(row, rows - 1), to = metal::min(row + count, rows) - 1;
  const bool one = from / p.queries == to / p.queries;
  PrefillSpan s;
  s.low = row_view(p, layout, b, one ? from % p.queries : 0, body);
  s.high = row_view(p, layout, b, one && to >= from ? to % p.queries : p.queries - 1, body);
  return s;
}

// The block at or after `block` that some row sees.
template <bool CODED>
METAL_FUNC int seen_block(PrefillSpan all, int block) {
  return CODED || block * TILE_ROWS < all.high.sinks ? block
                                                     : metal::max(block, all.low.first / TILE_ROWS);
}

// The steps of a slice.
template <typename T, bool CODED, int D, int DIMS>
METAL_FUNC void prefill_slice(thread PrefillState<D>& state,
                              thread const typename MatrixTypes<T>::pair* qf,
                              threadgroup uchar* memory, MatrixSide<T> keys, MatrixSide<T> values,
                              MatrixScales scales, PrefillRows rows, PrefillSpan all,
                              PrefillSpan own, int slice, int slices, uint tid, uint lane) {
  threadgroup T* key_tile = (threadgroup T*)memory;
  threadgroup T* value_tile = (threadgroup T*)(memory + PREFILL_TILE_BYTES(D));
  const int end = metal::max(all.high.sinks, all.high.last);
  const int blocks = (end + TILE_ROWS - 1) / TILE_ROWS;
  const int share = (blocks + slices - 1) / slices;
  const int to = metal::min((slice + 1) * share, blocks);
  const int latest = CODED ? scales.tokens - TILE_ROWS : end;  // where a step can be read
  const bool even = scales.tokens % 2 == 0;
  uint words[PREFILL_TURNS(D) * PREFILL_WORDS(CODED)] = {};
  float2 centres[2];
  centres[0] = centres[1] = float2(0.0f, 0.0f);

  int block = seen_block<CODED>(all, slice * share);
  if (block < to) {
    const int start = metal::min(block * TILE_ROWS, latest);
    load_chunks<T, CODED, D, DIMS>(words, keys, start, end - 1, tid);
    store_chunks<CODED, D, DIMS>((threadgroup uint4*)key_tile, words, keys.table, tid);
    load_chunks<T, CODED, D, DIMS>(words, values, start, end - 1, tid);
  }
  tile_barrier();
  for (int i = 0; block < to; i++) {
    PrefillTurn at;
    at.base = block * TILE_ROWS;
    at.start = metal::min(at.base, latest);
    at.end = end;
    const int next = seen_block<CODED>(all, block + 1);
    const int next_start = metal::min(next * TILE_ROWS, latest);
    rows.plain = at.base >= own.high.first && at.base + TILE_ROWS <= own.low.last;
    uint key_scales = 0, value_scales = 0;
    if (CODED && scales.scaled)
      key_scales = load_pair(scales.keys, at.start, even, lane);
    if (CODED && scales.weighted)
      value_scales = load_pair(scales.values, at.start, even, lane);

    float2 s[TILE_ROWS / 4];
    tile_scores<T, D>(s, qf, key_tile);
    store_chunks<CODED, D, DIMS>((threadgroup uint4*)value_tile, words, values.table, tid);
    if (next < to)
      load_chunks<T, CODED, D, DIMS>(words, keys, next_start, end - 1, tid);
    if (CODED && scales.centred && (i == 0 || block % PREFILL_CENTRES == 0))
      prefill_centres<T, D>(centres, qf, scales, block / PREFILL_CENTRES * PREFILL_CENTRES, to - 1,
                            lane);
    tile_wait<TILE_ROWS / 4>(s);
    prefill_scores<CODED>(s, centres, key_scales, scales, rows, at, lane);
    typename MatrixTypes<T>::pair weights[TILE_ROWS / 4];
    prefill_weights<T, CODED, D>(weights, state, s, value_scales, scales, rows, at, lane);
    tile_barrier();

    tile_outputs<T, D>(state.out, weights, value_tile);
    if (next < to) {
      store_chunks<CODED, D, DIMS>((threadgroup uint4*)key_tile, words, keys.table, tid);
      load_chunks<T, CODED, D, DIMS>(words, values, next_start, end - 1, tid);
    }
    tile_wait<D / 4>(state.out);
    tile_barrier();
    block = next;
  }
}

// The 16 rows of a simdgroup as left matrices, from threadgroup memory.
template <typename T, int D>
METAL_FUNC void prefill_queries(thread typename MatrixTypes<T>::pair* qf, threadgroup const T* q,
                                uint lane) {
  UNROLL
  for (int k = 0; k < D / 16; k++) {
    UNROLL
    for (int n = 0; n < 4; n++) {
      threadgroup const T* at = q + (int(matrix_row(lane)) + n / 2 * 8) * D + 16 * k + n % 2 * 8 +
                                int(matrix_column(lane));
      qf[4 * k + n] = matrix_pair(at[0], at[1]);
    }
  }
}

// Grid and outputs as for attention_tile, with tiles of PREFILL_ROWS rows.
template <typename T, int D, int DIMS>
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
  // queries, then two tiles and the tables
  threadgroup_bytes(memory, 2 * PREFILL_TILE_BYTES(D) + 256 * TABLE_ROW_BYTES);
  const int all_rows = p.heads / p.kv_heads * p.queries;
  const int row0 = int(tgid.x) * PREFILL_ROWS + 16 * int(sg);
  const long bh = tgid.y;
  const int b = int(bh) / p.kv_heads, h = int(bh) % p.kv_heads;
  const bool body = int(tgid.z) < p.splits;

  PrefillRows rows;
  rows.plain = false;
  UNROLL
  for (int i = 0; i < 2; i++) {
    const int r = metal::min(row0 + 8 * i + int(matrix_row(lane)), all_rows - 1);
    const RowView v = row_view(p, layout, b, r % p.queries, body);
    rows.sinks[i] = v.sinks;
    rows.first[i] = v.first;
    rows.last[i] = v.last;
  }
  const PrefillSpan all =
      prefill_span(p, layout, b, int(tgid.x) * PREFILL_ROWS, PREFILL_ROWS, all_rows, body);
  const PrefillSpan own = prefill_span(p, layout, b, row0, 16, all_rows, body);

  // rows beyond the last repeat it
  threadgroup ushort* query = (threadgroup ushort*)memory + int(sg) * (16 * D);
  device const float* diagonal = key_diagonal + (p.key_basis.per_head ? h * D : 0);
  for (int r = 0; r < 16; r++) {
    const long from = query_row(p, b, h, metal::min(row0 + r, all_rows - 1)) * D;
    const float most =
        load_query_row<T, D>(query + r * D, q, q_code, diagonal, p.key_basis, from, body, lane);
    UNROLL
    for (int i = 0; i < 2; i++) {
      if (r == 8 * i + int(matrix_row(lane)))
        rows.factor[i] = p.scale * most;
    }
  }
  UNROLL
  for (int i = 0; i < 2; i++)
    rows.factor[i] = metal::max(rows.factor[i], PREFILL_LEAST_FACTOR);
  simdgroup_barrier(mem_flags::mem_threadgroup);

  PrefillState<D> state;
  start_prefill<D>(state);
  const MatrixScales scales =
      matrix_scales<D>(p, body, bh, k_scales, v_scales, k_centres, k_centre_scales);
  threadgroup uchar* tables = memory + 2 * PREFILL_TILE_BYTES(D);
  if (body) {
    half2 qf[D / 4];
    prefill_queries<half, D>(qf, (threadgroup const half*)query, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fill_tables<DIMS, PREFILL_THREADS>(tables, k_table + (p.key.per_head ? h * 256 * DIMS : 0),
                                       v_table + (p.value.per_head ? h * 256 * DIMS : 0), tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const MatrixSides<half> sides = coded_sides<DIMS>(p, bh, k_codes, v_codes, tables, lane);
    prefill_slice<half, true, D, DIMS>(state, qf, memory, sides.keys, sides.values, scales, rows,
                                       all, own, int(tgid.z), p.splits, tid, lane);
  } else {
    typename MatrixTypes<T>::pair qf[D / 4];
    prefill_queries<T, D>(qf, (threadgroup const T*)query, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const MatrixSides<T> sides = tail_sides<T, D>(p, bh, k_tail, v_tail, tables);
    prefill_slice<T, false, D, DIMS>(state, qf, memory, sides.keys, sides.values, scales, rows, all,
                                     own, int(tgid.z) - p.splits, p.tail_splits, tid, lane);
  }

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
      *(device float2*)(to + 8 * n) = state.out[2 * n + i];
    if (matrix_column(lane) == 0) {
      const bool seen = state.m[i] > ATTENTION_LEAST;
      part_ml[at * 2] = seen ? metal::fma(state.m[i], rows.factor[i], state.unit) : ATTENTION_NEVER;
      part_ml[at * 2 + 1] = l;
    }
  }
}

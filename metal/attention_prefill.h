// Attention of many query rows over codes of bytes or trellises and a 16-bit tail, by matrices of a
// simdgroup. Host side: csrc/attention/launch.cpp.
//
// A threadgroup decodes tiles of keys and of values, times the scales of their tokens, into
// threadgroup memory, and all its simdgroups, each with 16 query rows in registers, multiply by
// them: S = Q K^T, then O += P V with P as it comes out of S.
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

// A slice's tile of keys or values; steps take them in turn.
template <typename T, int D>
METAL_FUNC threadgroup T* step_tile(threadgroup uchar* memory, int side, int step) {
  return (threadgroup T*)(memory +
                          (side * TILE_BUFFERS + step % TILE_BUFFERS) * PREFILL_TILE_BYTES(D));
}

// The steps of a slice. A step multiplies queries by its keys and the weights of the step before by
// the values of that; meanwhile it decodes the next keys and its values, and takes its scores to
// weights. Leaves in `unit` what the outputs count in.
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC void prefill_slice(thread PrefillState<D>& state, thread float& unit,
                              thread const TileQueries<T, D>& queries, threadgroup uchar* memory,
                              MatrixSide<T> keys, MatrixSide<T> values, MatrixScales scales,
                              constant AttentionParams& p, device const int* layout,
                              PrefillPlace place, thread const float* row_factor, PrefillSpan all,
                              PrefillSpan own, int slice, int slices, uint tid, uint lane) {
  constexpr int WORDS = PREFILL_TURNS(D) * PREFILL_WORDS(CODED, CODE);
  const int end = metal::max(all.high.sinks, all.high.last);
  const int blocks = (end + TILE_ROWS - 1) / TILE_ROWS;
  const int share = (blocks + slices - 1) / slices;
  const int to = metal::min((slice + 1) * share, blocks);
  const int latest = CODED ? scales.tokens - TILE_ROWS : end;  // where a step can be read
  const bool even = scales.tokens % 2 == 0;
  int block = seen_block<CODED>(all, slice * share);
  unit = 1.0f;
  if (block >= to)
    return;

  PrefillUnit key_unit, value_unit;
  const float tile_share = float(TILE_ROWS) / float(scales.block);  // of a centre's tokens
  PrefillCentre centre, none;
  start_centre(centre, CODED && scales.centred);
  start_centre(none, false);
  start_unit(key_unit, CODED && scales.scaled);
  start_unit(value_unit, CODED && scales.weighted);
  // codes are loaded a step ahead; vectors would take too many registers
  uint words[CODED ? 2 * WORDS : WORDS];
  thread uint* value_words = words + (CODED ? WORDS : 0);
  UNROLL
  for (int i = 0; i < (CODED ? 2 * WORDS : WORDS); i++)
    words[i] = 0u;
  typename MatrixTypes<T>::pair weights[TILE_ROWS / 4];
  UNROLL
  for (int i = 0; i < TILE_ROWS / 4; i++)
    weights[i] = matrix_rounded<T>(0.0f, 0.0f);

  int next = seen_block<CODED>(all, block + 1);
  int start = metal::min(block * TILE_ROWS, latest);
  load_chunks<T, CODED, D, CODE>(words, keys, start, end - 1, tid);
  load_unit(key_unit, scales.keys, start, even, lane);
  load_centre<D>(centre, scales, tile_share, block * TILE_ROWS, tid);
  raise_unit(key_unit, start, end, lane);
  raise_unit(key_unit, centre);
  store_chunks<CODED, D, CODE>((threadgroup uint4*)step_tile<T, D>(memory, 0, 0), words, keys.table,
                               key_unit, centre, tid);
  for (int i = int(tid); i < PREFILL_TILE_BYTES(D) / 16; i += PREFILL_THREADS)
    ((threadgroup uint4*)step_tile<T, D>(memory, 1, 1))[i] = uint4(0u, 0u, 0u, 0u);
  uint exponent = key_unit.exponent;
  if (CODED) {
    load_chunks<T, CODED, D, CODE>(value_words, values, start, end - 1, tid);
    load_unit(value_unit, scales.values, start, even, lane);
  }
  if (next < to) {
    start = metal::min(next * TILE_ROWS, latest);
    load_chunks<T, CODED, D, CODE>(words, keys, start, end - 1, tid);
    load_unit(key_unit, scales.keys, start, even, lane);
    load_centre<D>(centre, scales, tile_share, next * TILE_ROWS, tid);
  }
  tile_barrier();
  int i = 0;
  for (; block < to; i++) {
    float2 s[TILE_ROWS / 4];
    // products that take registers of queries end before others begin
    if (!TILE_QUERIES)
      tile_outputs<T, D>(state.out, weights, step_tile<T, D>(memory, 1, i + 1));
    tile_scores<T, D>(s, queries, step_tile<T, D>(memory, 0, i));
    if (TILE_QUERIES)
      tile_outputs<T, D>(state.out, weights, step_tile<T, D>(memory, 1, i + 1));
    if (TILE_BUFFERS == 1)
      tile_barrier();
    PrefillTurn at;
    at.base = block * TILE_ROWS;
    at.start = metal::min(at.base, latest);
    const int after = seen_block<CODED>(all, next + 1);
    const int next_start = metal::min(next * TILE_ROWS, latest);
    const int after_start = metal::min(after * TILE_ROWS, latest);
    float factor[2];
    UNROLL
    for (int n = 0; n < 2; n++) {
      factor[n] = CODED && (scales.scaled || scales.centred)
                      ? metal::max(row_factor[n] * unit_value(exponent), PREFILL_LEAST_FACTOR)
                      : row_factor[n];
    }

    if (next < to) {
      raise_unit(key_unit, next_start, end, lane);
      raise_unit(key_unit, centre);
      store_chunks<CODED, D, CODE>((threadgroup uint4*)step_tile<T, D>(memory, 0, i + 1), words,
                                   keys.table, key_unit, centre, tid);
    }
    exponent = key_unit.exponent;
    if (!CODED) {
      load_chunks<T, CODED, D, CODE>(words, values, at.start, end - 1, tid);
    } else if (after < to) {
      load_chunks<T, CODED, D, CODE>(words, keys, after_start, end - 1, tid);
      load_unit(key_unit, scales.keys, after_start, even, lane);
      load_centre<D>(centre, scales, tile_share, after * TILE_ROWS, tid);
    }
    tile_wait<TILE_ROWS / 4, 1>(s);
    if (at.base < own.high.first || at.base + TILE_ROWS > own.low.last)
      hide_scores(s, p, layout, place, at, CODED, lane);
    float shrink[2];
    bool raised = prefill_weights<D>(s, shrink, state, factor);

    const uint before = value_unit.exponent;
    raise_unit(value_unit, at.start, end, lane);
    store_chunks<CODED, D, CODE>((threadgroup uint4*)step_tile<T, D>(memory, 1, i), value_words,
                                 values.table, value_unit, none, tid);
    if (CODED) {
      if (next < to) {
        load_chunks<T, CODED, D, CODE>(value_words, values, next_start, end - 1, tid);
        load_unit(value_unit, scales.values, next_start, even, lane);
      }
    } else if (after < to) {
      load_chunks<T, CODED, D, CODE>(words, keys, after_start, end - 1, tid);
    }
    if (CODED && value_unit.exponent != before) {
      raised = true;
      const float by = metal::exp2(float(before) - float(value_unit.exponent));
      shrink[0] *= by;
      shrink[1] *= by;
    }

    tile_wait<D / 4, 0>(state.out);
    if (raised) {
      UNROLL
      for (int n = 0; n < D / 4; n++)
        state.out[n] = state.out[n] * shrink[n % 2];
    }
    round_weights<T>(weights, s);
    tile_barrier();
    block = next;
    next = after;
  }
  tile_outputs<T, D>(state.out, weights, step_tile<T, D>(memory, 1, i + 1));
  tile_wait<D / 4, 0>(state.out);
  if (CODED && scales.weighted)
    unit = unit_value(value_unit.exponent);
}

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
  // tiles, queries, which may lie in the place of others, and the tables
  threadgroup_bytes(memory, PREFILL_TABLES(D) + 256 * TABLE_ROW_BYTES);
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
  for (int r = 0; r < 16; r++) {
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
  if (body) {
    TileQueries<half, D> queries;
    tile_queries<half, D>(queries, (threadgroup const half*)query, sg, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    fill_tables<CODE, PREFILL_THREADS>(
        tables, k_table + (p.key.per_head ? h * 256 * CODE_DIMS(CODE) : 0),
        v_table + (p.value.per_head ? h * 256 * CODE_DIMS(CODE) : 0), tid);
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
    prefill_slice<T, false, D, CODE>(state, unit, queries, memory, sides.keys, sides.values, scales,
                                     p, layout, place, factor, all, own, int(tgid.z) - p.splits,
                                     p.tail_splits, tid, lane);
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
      *(device float2*)(to + 8 * n) = state.out[2 * n + i] * unit;
    if (matrix_column(lane) == 0) {
      part_ml[at * 2] = state.m[i];
      part_ml[at * 2 + 1] = l;
    }
  }
}

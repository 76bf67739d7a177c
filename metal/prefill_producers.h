// A slice where some simdgroups of a threadgroup only decode and the others only multiply, so that
// neither waits for the other as long as there are tiles to write and to read. See
// attention_prefill.h.
#pragma once

#include "matrix_inputs.h"
#include "prefill_blocks.h"
#include "prefill_step.h"

// Place in the turns of the tiles of one side, and how often the turn was round, modulo 2.
struct PrefillRing {
  int tile;
  uint round;
};
METAL_FUNC void start_ring(thread PrefillRing& r) {
  r.tile = 0;
  r.round = 0u;
}
METAL_FUNC void next_tile(thread PrefillRing& r) {
  r.tile++;
  if (r.tile == TILE_BUFFERS) {
    r.tile = 0;
    r.round ^= 1u;
  }
}

// Gates of the tiles of keys, then of values, and the exponents of the units of what lies there.
struct PrefillGates {
  threadgroup TileGate* written;
  threadgroup TileGate* read;
  threadgroup uint* exponents;
};
METAL_FUNC PrefillGates prefill_gates(threadgroup uchar* at) {
  PrefillGates g;
  g.written = (threadgroup TileGate*)at;
  g.read = g.written + 2 * TILE_BUFFERS;
  g.exponents = (threadgroup uint*)(g.read + 2 * TILE_BUFFERS);
  return g;
}
METAL_FUNC void start_gates(PrefillGates g, uint tid) {
  if (tid < uint(2 * TILE_BUFFERS)) {
    gate_start(g.written + tid, TILE_PRODUCERS / 2);
    gate_start(g.read + tid, TILE_SIMDS);
  }
}

// Waits until a tile may be written, or is.
METAL_FUNC void await_read(PrefillGates g, int side, PrefillRing r) {
  gate_wait(g.read + side * TILE_BUFFERS + r.tile, r.round ^ 1u);
}
METAL_FUNC uint await_written(PrefillGates g, int side, PrefillRing r) {
  const int at = side * TILE_BUFFERS + r.tile;
  gate_wait(g.written + at, r.round);
  return g.exponents[at];
}
METAL_FUNC void pass_written(PrefillGates g, int side, thread PrefillRing& r, uint exponent,
                             uint tid) {
  const int at = side * TILE_BUFFERS + r.tile;
  if (tid == 0)
    g.exponents[at] = exponent;
  gate_written(g.written + at);
  next_tile(r);
}
METAL_FUNC void pass_read(PrefillGates g, int side, thread PrefillRing& r) {
  gate_read(g.read + side * TILE_BUFFERS + r.tile);
  next_tile(r);
}

// Decodes what `words` are the codes of, and loads those of the tile at token `next` in their
// place.
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC void produce_turns(threadgroup uint4* tile, thread uint* words,
                              thread const MatrixSide<T>& s,
                              thread const PrefillFactors<D>& factors, int next, int last,
                              uint tid) {
  UNROLL
  for (int from = 0; from < PREFILL_TURNS(D); from += PREFILL_LOOKUPS) {
    uint4 values[PREFILL_LOOKUPS];
    turn_values<CODED, D, CODE>(values, words, s.table, factors, from, tid);
    load_turns<T, CODED, D, CODE>(words, s, next, last, from, PREFILL_LOOKUPS, tid);
    store_turns<D>(tile, values, from, tid);
  }
}

// Decodes the tiles of keys (side 0) or of values (side 1) of a slice. tid: of the threads that do.
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC void prefill_produce(threadgroup uchar* memory, PrefillGates gates, MatrixSides<T> sides,
                                MatrixScales scales, PrefillSpan all, int slice, int slices,
                                int side, uint tid, uint lane) {
  const PrefillBlocks blocks = prefill_blocks<CODED>(all, scales, slice, slices);
  int block = blocks.first;
  if (block >= blocks.to)
    return;
  const bool keys = side == 0, even = scales.tokens % 2 == 0;
  const float tile_share = float(TILE_ROWS) / float(scales.block);  // of a centre's tokens
  const MatrixSide<T> own = keys ? sides.keys : sides.values;
  device const bfloat* token_scales = keys ? scales.keys : scales.values;
  PrefillUnit unit;
  PrefillCentre centre;
  start_unit(unit, CODED && (keys ? scales.scaled : scales.weighted));
  start_centre(centre, CODED && keys && scales.centred);
  PrefillRing ring;
  start_ring(ring);
  uint words[PREFILL_TURNS(D) * PREFILL_WORDS(CODED, CODE_OF(CODE, 4))];  // loaded a step ahead

  int start = metal::min(block * TILE_ROWS, blocks.latest);
  load_chunks<T, CODED, D, CODE>(words, own, start, blocks.end - 1, tid);
  load_unit(unit, token_scales, start, even, lane);
  load_centre<D>(centre, scales, tile_share, block * TILE_ROWS, tid);
  if (!keys) {  // the values of the step before the first
    for (int i = int(tid); i < PREFILL_TILE_BYTES(D) / 16; i += PREFILL_DECODERS)
      ((threadgroup uint4*)step_tile<T, D>(memory, 1, 0))[i] = uint4(0u, 0u, 0u, 0u);
    pass_written(gates, 1, ring, unit.exponent, tid);
  }

  while (block < blocks.to) {
    const int next = seen_block<CODED>(all, block + 1);
    const int ahead = next < blocks.to ? next : block;  // there is always something to load
    const int next_start = metal::min(ahead * TILE_ROWS, blocks.latest);
    await_read(gates, side, ring);
    raise_unit(unit, start, blocks.end, lane);
    raise_unit(unit, centre, lane);
    PrefillFactors<D> factors;
    take_factors<CODED, D>(factors, unit, centre, tid);
    load_unit(unit, token_scales, next_start, even, lane);
    load_centre<D>(centre, scales, tile_share, ahead * TILE_ROWS, tid);
    threadgroup uint4* tile = (threadgroup uint4*)step_tile<T, D>(memory, side, ring.tile);
    FOR_SIDE_CODE(CODE, own.bits,
                  produce_turns<T, CODED, D, SIDE_CODE>(tile, words, own, factors, next_start,
                                                        blocks.end - 1, tid))
    pass_written(gates, side, ring, unit.exponent, tid);
    block = next;
    start = next_start;
  }
}

// Outputs so far count in the unit of `exponent` from here on.
template <int D>
METAL_FUNC void take_unit(thread PrefillState<D>& state, thread uint& before, uint exponent) {
  if (exponent == before)
    return;
  const float by = metal::exp2(float(before) - float(exponent));
  UNROLL
  for (int n = 0; n < D / 4; n++)
    state.out[n] = state.out[n] * by;
  before = exponent;
}

// Multiplies by the tiles of a slice: keys of a step, and values of the step before. Leaves in
// `unit` what the outputs count in.
template <typename T, bool CODED, int D>
METAL_FUNC void prefill_consume(thread PrefillState<D>& state, thread float& unit,
                                thread const TileQueries<T, D>& queries, threadgroup uchar* memory,
                                PrefillGates gates, MatrixScales scales,
                                constant AttentionParams& p, device const int* layout,
                                PrefillPlace place, thread const float* row_factor, PrefillSpan all,
                                PrefillSpan own, int slice, int slices, uint lane) {
  const PrefillBlocks blocks = prefill_blocks<CODED>(all, scales, slice, slices);
  int block = blocks.first;
  unit = 1.0f;
  if (block >= blocks.to)
    return;
  PrefillRing key_ring, value_ring;
  start_ring(key_ring);
  start_ring(value_ring);
  uint value_exponent = 0u;
  typename MatrixTypes<T>::pair weights[TILE_ROWS / 4];
  UNROLL
  for (int i = 0; i < TILE_ROWS / 4; i++)
    weights[i] = matrix_rounded<T>(0.0f, 0.0f);
  while (block < blocks.to) {
    float2 s[TILE_ROWS / 4];
    const int next = seen_block<CODED>(all, block + 1);
    const uint exponent_of_values = await_written(gates, 1, value_ring);
    const uint exponent = await_written(gates, 0, key_ring);
    take_unit<D>(state, value_exponent, exponent_of_values);
    tile_scores<T, D>(s, queries, step_tile<T, D>(memory, 0, key_ring.tile));
    tile_outputs<T, D>(state.out, weights, step_tile<T, D>(memory, 1, value_ring.tile));
    PrefillTurn at;
    at.base = block * TILE_ROWS;
    at.start = metal::min(at.base, blocks.latest);
    float factor[2];
    step_factors(factor, row_factor, CODED && (scales.scaled || scales.centred), exponent);
    tile_wait<TILE_ROWS / 4, 1>(s);
    pass_read(gates, 0, key_ring);
    if (at.base < own.high.first || at.base + TILE_ROWS > own.low.last)
      hide_scores(s, p, layout, place, at, CODED, lane);
    float shrink[2];
    const bool raised = prefill_weights<D>(s, shrink, state, factor);
    tile_wait<D / 4, 0>(state.out, state.l[0] + state.l[1]);
    pass_read(gates, 1, value_ring);
    if (raised) {
      UNROLL
      for (int n = 0; n < D / 4; n++)
        state.out[n] = state.out[n] * shrink[n % 2];
    }
    round_weights<T>(weights, s);
    block = next;
  }
  take_unit<D>(state, value_exponent, await_written(gates, 1, value_ring));
  tile_outputs<T, D>(state.out, weights, step_tile<T, D>(memory, 1, value_ring.tile));
  tile_wait<D / 4, 0>(state.out);
  if (CODED && scales.weighted)
    unit = unit_value(value_exponent);
}

// A slice where all simdgroups of a threadgroup decode and multiply. See attention_prefill.h.
#pragma once

#include "prefill_blocks.h"
#include "prefill_step.h"

// The steps of a slice. A step multiplies queries by its keys and the weights of the step before by
// the values of that, then decodes the next keys and its values and takes its scores to weights.
// Leaves in `unit` what the outputs count in.
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC void prefill_slice(thread PrefillState<D>& state, thread float& unit,
                              thread const TileQueries<T, D>& queries, threadgroup uchar* memory,
                              MatrixSide<T> keys, MatrixSide<T> values, MatrixScales scales,
                              constant AttentionParams& p, device const int* layout,
                              PrefillPlace place, thread const float* row_factor, PrefillSpan all,
                              PrefillSpan own, int slice, int slices, uint tid, uint lane) {
  constexpr int WORDS = PREFILL_TURNS(D) * PREFILL_WORDS(CODED, CODE_OF(CODE, 4));
  const PrefillBlocks blocks = prefill_blocks<CODED>(all, scales, slice, slices);
  const int to = blocks.to, end = blocks.end, latest = blocks.latest;
  const bool even = scales.tokens % 2 == 0;
  int block = blocks.first;
  unit = 1.0f;
  if (block >= to)
    return;

  threadgroup T* key_tile = step_tile<T, D>(memory, 0, 0);
  threadgroup T* value_tile = step_tile<T, D>(memory, 1, 0);
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
  raise_unit(key_unit, centre, lane);
  store_chunks<T, CODED, D, CODE>((threadgroup uint4*)key_tile, words, keys, key_unit, centre, tid);
  for (int i = int(tid); i < PREFILL_TILE_BYTES(D) / 16; i += PREFILL_THREADS)
    ((threadgroup uint4*)value_tile)[i] = uint4(0u, 0u, 0u, 0u);
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
  while (block < to) {
    float2 s[TILE_ROWS / 4];
    tile_outputs<T, D>(state.out, weights, value_tile);
    tile_scores<T, D>(s, queries, key_tile);
    tile_wait<D / 4, 1>(state.out);
    tile_wait<TILE_ROWS / 4, 0>(s);
    tile_barrier();
    PrefillTurn at;
    at.base = block * TILE_ROWS;
    at.start = metal::min(at.base, latest);
    const int after = seen_block<CODED>(all, next + 1);
    const int next_start = metal::min(next * TILE_ROWS, latest);
    const int after_start = metal::min(after * TILE_ROWS, latest);
    float factor[2];
    step_factors(factor, row_factor, CODED && (scales.scaled || scales.centred), exponent);

    if (next < to) {
      raise_unit(key_unit, next_start, end, lane);
      raise_unit(key_unit, centre, lane);
      store_chunks<T, CODED, D, CODE>((threadgroup uint4*)key_tile, words, keys, key_unit, centre,
                                      tid);
    }
    exponent = key_unit.exponent;
    if (!CODED) {
      load_chunks<T, CODED, D, CODE>(words, values, at.start, end - 1, tid);
    } else if (after < to) {
      load_chunks<T, CODED, D, CODE>(words, keys, after_start, end - 1, tid);
      load_unit(key_unit, scales.keys, after_start, even, lane);
      load_centre<D>(centre, scales, tile_share, after * TILE_ROWS, tid);
    }
    if (at.base < own.high.first || at.base + TILE_ROWS > own.low.last)
      hide_scores(s, p, layout, place, at, CODED, lane);
    float shrink[2];
    bool raised = prefill_weights<D>(s, shrink, state, factor);

    const uint before = value_unit.exponent;
    raise_unit(value_unit, at.start, end, lane);
    store_chunks<T, CODED, D, CODE>((threadgroup uint4*)value_tile, value_words, values, value_unit,
                                    none, tid);
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
  tile_outputs<T, D>(state.out, weights, value_tile);
  tile_wait<D / 4, 0>(state.out);
  if (CODED && scales.weighted)
    unit = unit_value(value_unit.exponent);
}

// Tiles of tokens for attention_prefill.h: decoded by a whole threadgroup, codes loaded ahead.
#pragma once

#include "matrix_tokens.h"

#define PREFILL_THREADS (32 * TILE_SIMDS)
#define PREFILL_ROWS (16 * TILE_SIMDS)
#define PREFILL_TILE_BYTES(D) (2 * TILE_ROWS * (D))
// A thread has one chunk of eight values of every PREFILL_STRIDE-th row of a tile, and loads
// PREFILL_WORDS for each.
#define PREFILL_STRIDE(D) (PREFILL_THREADS / ((D) / 8))
#define PREFILL_TURNS(D) ((TILE_ROWS + PREFILL_STRIDE(D) - 1) / PREFILL_STRIDE(D))
#define PREFILL_WORDS(CODED) ((CODED) ? 1 : 4)

METAL_FUNC void chunk_words(thread uint* words, uint4 x) {
  words[0] = x.x;
  words[1] = x.y;
  words[2] = x.z;
  words[3] = x.w;
}

// What the thread has of the tile at token `start`: codes, or vectors. In place of those after
// `last` stands it: what lies there may be NaN, and 0 * NaN is not 0.
template <typename T, bool CODED, int D, int DIMS>
METAL_FUNC void load_chunks(thread uint* words, MatrixSide<T> s, int start, int last, uint tid) {
  const int first_row = int(tid / (D / 8)), chunk = int(tid % (D / 8));
  UNROLL
  for (int turn = 0; turn < PREFILL_TURNS(D); turn++) {
    const int row = first_row + turn * PREFILL_STRIDE(D);
    if (row >= TILE_ROWS)
      continue;
    if (CODED) {
      load_bytes<8 / DIMS>(words + turn,
                           s.codes + long(start + row) * (D / DIMS) + chunk * (8 / DIMS));
    } else {
      const int slot = metal::min(start + row, last);
      const uint4 x = ((device const uint4*)(s.vectors + long(slot) * D))[chunk];
      chunk_words(words + turn * PREFILL_WORDS(CODED), x);
    }
  }
}

template <bool CODED, int DIMS>
METAL_FUNC uint4 chunk_values(thread const uint* words, MatrixTable table) {
  if (!CODED)
    return uint4(words[0], words[CODED ? 0 : 1], words[CODED ? 0 : 2], words[CODED ? 0 : 3]);
  const uint2 a = as_type<uint2>(four_coded<DIMS>(words, table, 0));
  const uint2 b = as_type<uint2>(four_coded<DIMS>(words, table, 1));
  return uint4(a.x, a.y, b.x, b.y);
}

template <bool CODED, int D, int DIMS>
METAL_FUNC void store_chunks(threadgroup uint4* tile, thread const uint* words, MatrixTable table,
                             uint tid) {
  const int first_row = int(tid / (D / 8)), chunk = int(tid % (D / 8));
  UNROLL
  for (int turn = 0; turn < PREFILL_TURNS(D); turn++) {
    const int row = first_row + turn * PREFILL_STRIDE(D);
    if (row < TILE_ROWS)
      tile[tile_chunk<D>(row, chunk)] =
          chunk_values<CODED, DIMS>(words + turn * PREFILL_WORDS(CODED), table);
  }
}

// Two scales of neighbouring tokens, bfloats, as one word. Lanes hold those of a tile in turn.
METAL_FUNC uint load_pair(device const bfloat* scales, int start, bool even, uint lane) {
  device const bfloat* at = scales + start + 2 * (int(lane) % (TILE_ROWS / 2));
  if (even)
    return *(device const uint*)at;
  device const ushort* both = (device const ushort*)at;
  return uint(both[0]) | uint(both[1]) << 16;
}
METAL_FUNC float2 pair_scales(uint word) {
  return float2(as_type<float>(word << 16), as_type<float>(word & 0xffff0000u));
}

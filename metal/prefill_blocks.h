// The tokens of a slice in blocks of TILE_ROWS, and where their tiles lie. See attention_prefill.h.
#pragma once

#include "matrix_step.h"
#include "prefill_tile.h"

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

// What a slice has of all blocks of TILE_ROWS tokens.
struct PrefillBlocks {
  int first, to;  // blocks; to: the one after the last
  int end;        // the token after the last that some row sees
  int latest;     // where a step can be read
};
template <bool CODED>
METAL_FUNC PrefillBlocks prefill_blocks(PrefillSpan all, MatrixScales scales, int slice,
                                        int slices) {
  PrefillBlocks b;
  b.end = metal::max(all.high.sinks, all.high.last);
  const int blocks = (b.end + TILE_ROWS - 1) / TILE_ROWS;
  const int share = (blocks + slices - 1) / slices;
  b.to = metal::min((slice + 1) * share, blocks);
  b.latest = CODED ? scales.tokens - TILE_ROWS : b.end;
  b.first = seen_block<CODED>(all, slice * share);
  return b;
}

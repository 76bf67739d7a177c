// Tiles of tokens for attention_prefill.h: decoded by a whole threadgroup, codes loaded ahead.
#pragma once

#include "matrix_tokens.h"

#define PREFILL_THREADS (32 * (TILE_SIMDS + TILE_PRODUCERS))
// Threads that decode a tile: half of those that do nothing else, or all.
#define PREFILL_DECODERS (32 * (TILE_PRODUCERS > 0 ? TILE_PRODUCERS / 2 : TILE_SIMDS))
#define PREFILL_ROWS (16 * TILE_SIMDS)
#define PREFILL_TILE_BYTES(D) (2 * TILE_ROWS * (D))
// Threadgroup memory: tiles of keys and of values, queries, tables. Queries that become registers
// lie in the place of the others.
#define PREFILL_QUERIES(D) (TILE_PRODUCERS > 0 ? 2 * TILE_BUFFERS * PREFILL_TILE_BYTES(D) : 0)
#define PREFILL_TABLES(D) \
  (2 * TILE_BUFFERS * PREFILL_TILE_BYTES(D) + (TILE_PRODUCERS > 0 ? 2 * PREFILL_ROWS * (D) : 0))
#define PREFILL_GATES(D) (PREFILL_TABLES(D) + 256 * TABLE_ROW_BYTES)
#define PREFILL_GATE_BYTES (TILE_PRODUCERS > 0 ? 128 : 0)
// Rows whose look-ups are under way together.
#define PREFILL_LOOKUPS 2
// A thread that decodes has one chunk of eight values of every PREFILL_STRIDE-th row of a tile, and
// loads PREFILL_WORDS for each.
#define PREFILL_STRIDE(D) (PREFILL_DECODERS / ((D) / 8))
#define PREFILL_TURNS(D) ((TILE_ROWS + PREFILL_STRIDE(D) - 1) / PREFILL_STRIDE(D))
#define PREFILL_WORDS(CODED, CODE) ((CODED) ? CODE_WORDS(CODE, 8) : 4)
// Whether every thread has a row in this turn.
#define PREFILL_WHOLE(D, turn) (((turn) + 1) * PREFILL_STRIDE(D) <= TILE_ROWS)

METAL_FUNC void chunk_words(thread uint* words, uint4 x) {
  words[0] = x.x;
  words[1] = x.y;
  words[2] = x.z;
  words[3] = x.w;
}

// Where a thread's first trellis code lies in a tile; strides are multiples of eight rows.
template <int CODE, int D>
METAL_FUNC uint chunk_skew(int row, int chunk) {
  return uint(row * CODE_ROW(CODE, D) + chunk * CODE_BYTES(CODE, 8));
}

// What the thread has of turns [from, from + count) of the tile at token `start`: codes, or
// vectors. In place of those after `last` stands it: what lies there may be NaN, and 0 * NaN is not
// 0.
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC void load_turns(thread uint* words, MatrixSide<T> s, int start, int last, int from,
                           int count, uint tid) {
  const int first_row = int(tid / (D / 8)), chunk = int(tid % (D / 8));
  UNROLL
  for (int i = 0; i < count; i++) {
    const int turn = from + i, row = first_row + turn * PREFILL_STRIDE(D);
    if (turn >= PREFILL_TURNS(D) || (!PREFILL_WHOLE(D, turn) && row >= TILE_ROWS))
      continue;
    if (CODED) {
      constexpr int BYTES = CODE_BYTES(CODE, 8), WORDS = CODE_WORDS(CODE, 8);
      if (CODE > 0)
        load_bytes<BYTES>(words + turn * WORDS,
                          s.codes + long(start + row) * CODE_ROW(CODE, D) + chunk * BYTES);
      else  // steps begin at a word
        load_words<BYTES, WORDS>(words + turn * WORDS,
                                 (device const uint*)(s.codes + long(start) * CODE_ROW(CODE, D)) +
                                     turn * PREFILL_STRIDE(D) * CODE_ROW(CODE, D) / 4,
                                 chunk_skew<CODE, D>(first_row, chunk));
    } else {
      const int slot = metal::min(start + row, last);
      const uint4 x = ((device const uint4*)(s.vectors + long(slot) * D))[chunk];
      chunk_words(words + turn * PREFILL_WORDS(CODED, CODE), x);
    }
  }
}
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC void load_chunks(thread uint* words, MatrixSide<T> s, int start, int last, uint tid) {
  FOR_SIDE_CODE(CODE, s.bits,
                load_turns<T, CODED, D, SIDE_CODE>(words, s, start, last, 0, PREFILL_TURNS(D), tid))
}

// The scales of a tile's tokens and the power of two that decoded values are relative to, at least
// the largest scale of this tile and of those before: 16 bits hold what an entry times its scale
// is by it.
struct PrefillUnit {
  bool scaled;
  uint pair;      // the scales of two tokens; lanes hold those of a tile in turn
  uint exponent;  // the unit is 2^(exponent - 126)
};

METAL_FUNC void start_unit(thread PrefillUnit& u, bool scaled) {
  u.scaled = scaled;
  u.pair = 0u;
  u.exponent = scaled ? 1u : 126u;
}
METAL_FUNC float unit_value(uint exponent) {
  return as_type<float>((exponent + 1u) << 23);
}

// Loads end here, so that what follows does not wait for them.
METAL_FUNC void load_unit(thread PrefillUnit& u, device const bfloat* scales, int start, bool even,
                          uint lane) {
  if (!u.scaled)
    return;
  device const bfloat* at = scales + start + 2 * (int(lane) % (TILE_ROWS / 2));
  if (even) {
    u.pair = *(device const uint*)at;
  } else {
    device const ushort* both = (device const ushort*)at;
    u.pair = uint(both[0]) | uint(both[1]) << 16;
  }
}

// Tokens from `end` on, which no row sees, get the scale 0.
METAL_FUNC void raise_unit(thread PrefillUnit& u, int start, int end, uint lane) {
  if (!u.scaled)
    return;
  const int seen = end - start - 2 * (int(lane) % (TILE_ROWS / 2));
  u.pair = seen >= 2 ? u.pair : seen == 1 ? u.pair & 0xffffu : 0u;
  const uint both = u.pair & 0x7fff7fffu;
  const uint most = metal::simd_max(metal::max(both & 0xffffu, both >> 16)) >> 7;
  u.exponent = metal::max(u.exponent, metal::min(most, 252u));
}

// Eight values of the centre of a tile.
struct PrefillCentre {
  bool there;
  uint2 values;
  uint unit;  // a bfloat
};

METAL_FUNC void start_centre(thread PrefillCentre& c, bool there) {
  c.there = there;
  c.values = uint2(0u, 0u);
  c.unit = 0u;
}

template <int D>
METAL_FUNC void load_centre(thread PrefillCentre& c, MatrixScales scales, float share, int base,
                            uint tid) {
  if (!c.there)
    return;
  // base / block, which division would take longer for
  const int index = int((float(base / TILE_ROWS) + 0.5f) * share);
  c.values = ((device const uint2*)(scales.centres + long(index) * D))[tid % (D / 8)];
  c.unit = ((device const ushort*)scales.centre_scales)[index];
}

// Centres are no larger than 128 of their units.
METAL_FUNC void raise_unit(thread PrefillUnit& u, thread PrefillCentre& c, uint lane) {
  if (!c.there)
    return;
  // What is known to be the same in all lanes may get a register that they share, and be waited for
  // where it is loaded.
  c.unit = metal::simd_shuffle(c.unit, ushort(lane));
  u.exponent = metal::max(u.exponent, metal::min((c.unit >> 7) + 7u, 252u));
}

METAL_FUNC half2 centre_pair(uint word, int i, float by) {
  const int at = 16 * i;
  return matrix_rounded<half>(float(int(word << (24 - at)) >> 24) * by,
                              float(int(word << (16 - at)) >> 24) * by);
}

// Eight values of a token: entries times `scale`, half a word, plus the centre.
template <bool CODED, int CODE>
METAL_FUNC uint4 chunk_values(thread const uint* words, MatrixTable table, uint skew, uint scale,
                              thread const uint* centre) {
  if (!CODED)
    return uint4(words[0], words[CODED ? 0 : 1], words[CODED ? 0 : 2], words[CODED ? 0 : 3]);
  const half one = as_type<half2>(scale).x;
  const half2 by = half2(one, one);
  const uint2 a = as_type<uint2>(four_coded<CODE, 8>(words, table, 0, skew));
  const uint2 b = as_type<uint2>(four_coded<CODE, 8>(words, table, 1, skew));
  return uint4(as_type<uint>(metal::fma(as_type<half2>(a.x), by, as_type<half2>(centre[0]))),
               as_type<uint>(metal::fma(as_type<half2>(a.y), by, as_type<half2>(centre[1]))),
               as_type<uint>(metal::fma(as_type<half2>(b.x), by, as_type<half2>(centre[2]))),
               as_type<uint>(metal::fma(as_type<half2>(b.y), by, as_type<half2>(centre[3]))));
}

// What the chunks of a tile are multiplied by, in turn, and what is added to each.
template <int D>
struct PrefillFactors {
  uint by[PREFILL_TURNS(D)];  // in the lower half
  uint added[4];              // in words, as compilers may keep arrays of half2 in memory
};
template <bool CODED, int D>
METAL_FUNC void take_factors(thread PrefillFactors<D>& f, PrefillUnit unit, PrefillCentre centre,
                             uint tid) {
  const int first_row = int(tid / (D / 8));
  const float inverse = as_type<float>((253u - unit.exponent) << 23);
  UNROLL
  for (int i = 0; i < 4; i++)
    f.added[i] = 0u;
  if (CODED && centre.there) {
    const float by_unit = as_type<float>(centre.unit << 16) * inverse;
    UNROLL
    for (int i = 0; i < 4; i++)
      f.added[i] =
          as_type<uint>(centre_pair(i < 2 ? centre.values.x : centre.values.y, i % 2, by_unit));
  }
  const uint plain = as_type<uint>(matrix_rounded<half>(inverse, inverse));
  const uint scaled =
      as_type<uint>(matrix_rounded<half>(as_type<float>(unit.pair << 16) * inverse,
                                         as_type<float>(unit.pair & 0xffff0000u) * inverse));
  UNROLL
  for (int turn = 0; turn < PREFILL_TURNS(D); turn++)
    f.by[turn] = plain;
  if (CODED && unit.scaled) {
    UNROLL
    for (int turn = 0; turn < PREFILL_TURNS(D); turn++) {
      const int row = first_row + turn * PREFILL_STRIDE(D);
      f.by[turn] = metal::simd_shuffle(scaled, ushort(row / 2 % 32)) >> (first_row % 2 * 16);
    }
  }
}

// The chunks of turns [from, from + PREFILL_LOOKUPS).
template <bool CODED, int D, int CODE>
METAL_FUNC void turn_values(thread uint4* values, thread const uint* words, MatrixTable table,
                            thread const PrefillFactors<D>& f, int from, uint tid) {
  const int first_row = int(tid / (D / 8)), chunk = int(tid % (D / 8));
  UNROLL
  for (int i = 0; i < PREFILL_LOOKUPS; i++) {
    const int turn = from + i;
    if (turn < PREFILL_TURNS(D) &&
        (PREFILL_WHOLE(D, turn) || first_row + turn * PREFILL_STRIDE(D) < TILE_ROWS))
      values[i] =
          chunk_values<CODED, CODE>(words + turn * PREFILL_WORDS(CODED, CODE), table,
                                    chunk_skew<CODE, D>(first_row, chunk), f.by[turn], f.added);
  }
}
template <int D>
METAL_FUNC void store_turns(threadgroup uint4* tile, thread const uint4* values, int from,
                            uint tid) {
  const int first_row = int(tid / (D / 8)), chunk = int(tid % (D / 8));
  const int at = tile_chunk<D>(first_row, chunk);  // strides are multiples of eight rows
  UNROLL
  for (int i = 0; i < PREFILL_LOOKUPS; i++) {
    const int turn = from + i;
    if (turn < PREFILL_TURNS(D) &&
        (PREFILL_WHOLE(D, turn) || first_row + turn * PREFILL_STRIDE(D) < TILE_ROWS))
      tile[at + tile_chunk<D>(turn * PREFILL_STRIDE(D), 0)] = values[i];
  }
}

template <bool CODED, int D, int CODE>
METAL_FUNC void decode_turns(threadgroup uint4* tile, thread const uint* words, MatrixTable table,
                             thread const PrefillFactors<D>& factors, uint tid) {
  // all look-ups of a few turns before their stores, which the compiler takes to touch tables
  UNROLL
  for (int from = 0; from < PREFILL_TURNS(D); from += PREFILL_LOOKUPS) {
    uint4 values[PREFILL_LOOKUPS];
    turn_values<CODED, D, CODE>(values, words, table, factors, from, tid);
    store_turns<D>(tile, values, from, tid);
  }
}
template <typename T, bool CODED, int D, int CODE>
METAL_FUNC void store_chunks(threadgroup uint4* tile, thread const uint* words, MatrixSide<T> s,
                             PrefillUnit unit, PrefillCentre centre, uint tid) {
  PrefillFactors<D> factors;
  take_factors<CODED, D>(factors, unit, centre, tid);
  FOR_SIDE_CODE(CODE, s.bits, decode_turns<CODED, D, SIDE_CODE>(tile, words, s.table, factors, tid))
}

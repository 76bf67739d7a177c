// Scalar quantisation of rows after the randomized Hadamard transform. Host side:
// csrc/hadamard/launch.cpp.
#pragma once

#include "hadamard_levels.h"
#include "hadamard_quads.h"

// Lanes of a row where it is quantised, as in csrc/hadamard/launch.cpp: 32 values each if it can
// be.
#define HADAMARD_LANES(D, M) ((M) > 1 || (D) < 32 || (D) > 512 ? 32 : (D) <= 128 ? 4 : (D) / 32)

// The factor of the levels, from |v|^2, <v, levels> and |levels|^2. Rows that are not finite decode
// to NaN; a row of zeros, or one whose levels say nothing about it, decodes to zeros.
METAL_FUNC float hadamard_row_scale(int kind, float norm2, float dot, float square, float root) {
  if (!metal::isfinite(norm2))
    return NAN;
  float over = norm2, under = dot;  // HADAMARD_UNBIASED
  if (kind == HADAMARD_MSE) {
    over = dot;
    under = square;
  } else if (kind == HADAMARD_NORM) {
    over = metal::sqrt(norm2);
    under = root;
  } else if (kind == HADAMARD_MATCHED) {
    over = metal::sqrt(norm2);
    under = metal::sqrt(square);
  }
  return norm2 > 0.0f && under > 0.0f ? over / under : 0.0f;
}

// Stores a lane's codes of a row: words[r], the codes of JOINED lanes, from channel 32 r on.
template <int D, int LANES>
METAL_FUNC void hadamard_store_codes(device uchar* bytes, thread const uint* words, int first,
                                     constant HadamardQuantizeParams& p) {
  constexpr int E = (D + 31) / 32, JOINED = LANES > 4 ? LANES / 4 : 1;
  const int at = first / JOINED * p.bits;
  if (D % 32 == 0 && p.bits == 4) {
    UNROLL
    for (int r = 0; r < E; r++)
      *(device uint*)(bytes + at + 16 * r) = words[r];
  } else if (D % 32 == 0 && p.bits == 2) {
    UNROLL
    for (int r = 0; r < E; r++)
      *(device ushort*)(bytes + at + 8 * r) = ushort(words[r]);
  } else {
    for (int i = 0; i < p.bits; i++) {
      UNROLL
      for (int r = 0; r < E; r++) {
        if (D % 32 == 0 || at + 4 * r * p.bits + i < p.bytes)
          bytes[at + 4 * r * p.bits + i] = uchar((words[r] >> (8 * i)) & 0xff);
      }
    }
  }
}

// Codes of v times factor, stored if the row is `live`, and the lane's part of <v, levels> and
// |levels|^2. Rows that are not finite get codes of 0.
template <int D, int LANES, int SEARCH>
METAL_FUNC void hadamard_codes(thread const float* v, float factor, bool finite,
                               threadgroup const float* table, device uchar* bytes, bool live,
                               uint lane, constant HadamardQuantizeParams& p, thread float* dots,
                               thread float* squares) {
  constexpr int E = (D + 31) / 32, KEPT = 32 / LANES, JOINED = KEPT < 8 ? 8 / KEPT : 1;
  const HadamardLevels levels = hadamard_levels<SEARCH>(table, factor);
  const int first = int(lane % LANES);
  uint words[E];  // from the second code on four times that
  UNROLL
  for (int r = 0; r < E; r++)
    words[r] = 0;
  UNROLL
  for (int k = KEPT - 1; k >= 0; k--) {
    dots[k] = squares[k] = 0.0f;
    UNROLL
    for (int r = 0; r < E; r++) {
      const int c = 32 * r + KEPT * first + k;
      const float x = v[r * KEPT + k];
      const bool inside = D % 32 == 0 || c < D;
      float level;
      uint code4 = hadamard_code<D, SEARCH>(x, levels, level);
      if (!inside) {
        code4 = 0;
        level = 0.0f;
      }
      dots[k] = metal::fma(x, level, dots[k]);
      squares[k] = metal::fma(level, level, squares[k]);
      if (SEARCH == HADAMARD_BY_WIDE_TREE) {
        if (live && inside)
          bytes[c] = uchar(finite ? code4 / 4 : 0u);
      } else if (k > 0) {
        words[r] = words[r] * uint(p.levels) + code4;
      } else {
        words[r] = (words[r] >> 2) * uint(p.levels) + (code4 >> 2);
      }
    }
    hadamard_add<LANES>(dots, k);
    hadamard_add<LANES>(squares, k);
  }
  UNROLL
  for (int r = 0; r < E; r++) {
    if (SEARCH != HADAMARD_BY_WIDE_TREE) {
      UNROLL
      for (int h = 1; h < JOINED; h *= 2) {
        const uint other = metal::simd_shuffle_xor(words[r], ushort(h));
        const int shift = p.bits * KEPT * h;
        words[r] = (first & h) != 0 ? other | words[r] << shift : words[r] | other << shift;
      }
      words[r] = finite ? words[r] : 0u;
    }
  }
  if (SEARCH != HADAMARD_BY_WIDE_TREE && live && first % JOINED == 0)
    hadamard_store_codes<D, LANES>(bytes, words, first, p);
}

// |v|^2, <v, levels> and |levels|^2 of a row.
struct HadamardSums {
  float norm2, dot, square;
};

METAL_FUNC bfloat hadamard_scale(HadamardSums s, constant HadamardQuantizeParams& p) {
  return bfloat(hadamard_row_scale(p.kind, s.norm2, s.dot, s.square, p.root) * p.unit);
}

// Codes of the row v by a kind of search, stored if the row is `live`.
template <int D, int LANES>
METAL_FUNC HadamardSums hadamard_encode(thread float* v, int search, threadgroup const float* table,
                                        device uchar* packed, long row, bool live, uint lane,
                                        constant HadamardQuantizeParams& p) {
  constexpr int E = (D + 31) / 32, KEPT = 32 / LANES;
  float part[KEPT], dots[KEPT], squares[KEPT];
  UNROLL
  for (int k = KEPT - 1; k >= 0; k--) {
    part[k] = 0.0f;
    UNROLL
    for (int r = 0; r < E; r++)
      part[k] = metal::fma(v[r * KEPT + k], v[r * KEPT + k], part[k]);
    hadamard_add<LANES>(part, k);
  }
  HadamardSums sums;
  sums.norm2 = hadamard_sum<LANES>(part);
  const float factor = sums.norm2 > 0.0f ? p.root / metal::sqrt(sums.norm2) : 0.0f;
  const bool finite = metal::isfinite(sums.norm2);
  if (sums.norm2 < 1.0e-40f) {  // too few bits: a value may seem to be longer than its row
    const float most = metal::sqrt(sums.norm2);
    UNROLL
    for (int i = 0; i < E * KEPT; i++)
      v[i] = metal::clamp(v[i], -most, most);
  }
  device uchar* bytes = packed + row * p.bytes;
  if (search == HADAMARD_BY_CELL)
    hadamard_codes<D, LANES, HADAMARD_BY_CELL>(v, factor, finite, table, bytes, live, lane, p, dots,
                                               squares);
  else if (search == HADAMARD_BY_TREE)
    hadamard_codes<D, LANES, HADAMARD_BY_TREE>(v, factor, finite, table, bytes, live, lane, p, dots,
                                               squares);
  else
    hadamard_codes<D, LANES, HADAMARD_BY_WIDE_TREE>(v, factor, finite, table, bytes, live, lane, p,
                                                    dots, squares);
  sums.dot = hadamard_sum<LANES>(dots);
  sums.square = hadamard_sum<LANES>(squares);
  return sums;
}

// The scales of as many rows as there are lanes are left to a lane each: `step` is from one of a
// lane's rows to the next.
template <int LANES>
METAL_FUNC void hadamard_keep(thread HadamardSums& kept, HadamardSums sums, long row, long step,
                              int pass, bool last, device bfloat* scales, uint lane,
                              constant HadamardQuantizeParams& p) {
  const int mine = int(lane % LANES), now = pass % LANES;
  if (mine == now)
    kept = sums;
  if (last || now == LANES - 1) {
    const long its = row - (now - mine) * step;
    if (mine <= now && its < p.rows)
      scales[its] = hadamard_scale(kept, p);
  }
}

// LANES lanes per row. The threadgroups, of SIMDS simdgroups, take tiles of rows in turns. With
// `centred` every sequence has a centre [D] and its unit.
template <int D, int M, int LANES, int SIMDS>
METAL_FUNC void hadamard_quantize_rows(device const uchar* x, device const float* signs,
                                       device const char* centres,
                                       device const bfloat* centre_scales, bool centred,
                                       threadgroup const float* table, bool quads,
                                       device uchar* packed, device bfloat* scales, uint group,
                                       uint lane, uint sg, constant HadamardQuantizeParams& p) {
  constexpr int VALUES = (D + 31) / 32 * (32 / LANES), ROWS = 32 / LANES;
  const int groups = threadgroups_in_grid(p.groups);
  uint flips[HADAMARD_FLIPS(D)] = {};
  HadamardSums kept = {};
  int pass = 0;
  for (int left = p.tiles - int(group); left > 0; left -= groups, pass++) {
    const long at = (long(p.tiles - left) * SIMDS + sg) * ROWS + lane / LANES;
    const long row = metal::min(at, p.rows - 1);  // lanes past the end repeat the last
    float v[VALUES];
    if (quads && (pass == 0 || p.heads > 1))
      hadamard_flips<D, M, LANES>(flips, signs, row, lane, p);
    hadamard_rotate<D, M, LANES>(v, x, signs, quads, flips, row, lane, p);
    if (centred) {
      const long sequence = hadamard_sequence(row, p);
      const float unit = float(centre_scales[sequence]);
      float centre[VALUES];
      hadamard_row<D, LANES, char>(centre, (device const uchar*)(centres + sequence * D), lane,
                                   p.wide != 0);
      UNROLL
      for (int i = 0; i < VALUES; i++)
        v[i] -= centre[i] * unit;
    }
    const HadamardSums sums = hadamard_encode<D, LANES>(v, hadamard_search(table, p.bits), table,
                                                        packed, row, at < p.rows, lane, p);
    hadamard_keep<LANES>(kept, sums, at, long(groups) * (SIMDS * ROWS), pass, left <= groups,
                         scales, lane, p);
  }
}

template <int D, int M, int LANES>
kernel void hadamard_quantize(
    device const uchar* x [[buffer(0)]], device const float* signs [[buffer(1)]],
    device const float* centroids [[buffer(2)]], device const char* centres [[buffer(3)]],
    device const bfloat* centre_scales [[buffer(4)]], device uchar* packed [[buffer(5)]],
    device bfloat* scales [[buffer(6)]], constant HadamardQuantizeParams& p [[buffer(7)]],
    uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup_array(float, table, HADAMARD_TABLE);
  hadamard_table<D, 32 * HADAMARD_SIMDGROUPS>(table, centroids, tid, p.bits, p.root);
  const bool quads = hadamard_has_quads<D, M, LANES>(signs, lane, p);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  hadamard_quantize_rows<D, M, LANES, HADAMARD_SIMDGROUPS>(x, signs, centres, centre_scales,
                                                           p.frozen != 0, table, quads, packed,
                                                           scales, tgid.x, lane, sg, p);
}

// Adds the rows of a simdgroup that are below `rows`, the even ones to low and the odd ones to
// high, each in order; here channel 32 r + lane is value r of a lane.
template <int D, int LANES>
METAL_FUNC void hadamard_gather(thread float* low, thread float* high, thread const float* v,
                                threadgroup float* stage, uint lane, int rows) {
  constexpr int E = (D + 31) / 32, KEPT = 32 / LANES, STRIDE = 36;
  UNROLL
  for (int r = 0; r < E; r++) {
    if (LANES == 32) {
      low[r] += rows > 0 ? v[r] : 0.0f;
      continue;
    }
    threadgroup float* mine = stage + lane / LANES * STRIDE + KEPT * (lane % LANES);
    UNROLL
    for (int k = 0; k < KEPT; k += 4) {
      if (KEPT >= 4) {
        *(threadgroup float4*)(mine + k) =
            float4(v[r * KEPT + k], v[r * KEPT + k + 1 % KEPT], v[r * KEPT + k + 2 % KEPT],
                   v[r * KEPT + k + 3 % KEPT]);
      } else {
        mine[0] = v[r * KEPT];
        mine[1 % KEPT] = v[r * KEPT + 1 % KEPT];
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int q = 0; q < KEPT; q++) {
      if (q < rows) {
        const float x = stage[q * STRIDE + int(lane)];
        if (q % 2 == 0)
          low[r] += x;
        else
          high[r] += x;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// One threadgroup per block of p.block rows, whose mean is subtracted. Of blocks that its lanes
// cannot hold at once a token is transformed twice rather than kept.
template <int D, int M, int LANES>
kernel void hadamard_quantize_blocks(
    device const uchar* x [[buffer(0)]], device const float* signs [[buffer(1)]],
    device const float* centroids [[buffer(2)]], device uchar* packed [[buffer(3)]],
    device bfloat* scales [[buffer(4)]], device char* centres [[buffer(5)]],
    device bfloat* centre_scales [[buffer(6)]], constant HadamardQuantizeParams& p [[buffer(7)]],
    uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int E = (D + 31) / 32, KEPT = 32 / LANES, PASS = HADAMARD_SIMDGROUPS * KEPT;
  threadgroup_array(float, table, HADAMARD_TABLE);
  threadgroup_array(float, shared, HADAMARD_SIMDGROUPS / 2 * 32 * E);
  threadgroup_array(float4, stages, HADAMARD_SIMDGROUPS * KEPT * 9);
  const long first = long(tgid.x) * p.block;
  const int mine = int(sg + HADAMARD_SIMDGROUPS * (lane / LANES));  // row of a pass
  const bool quads = hadamard_has_quads<D, M, LANES>(signs, lane, p);
  uint flips[HADAMARD_FLIPS(D)] = {};
  if (quads)  // a block is of one head
    hadamard_flips<D, M, LANES>(flips, signs, first, lane, p);

  // Tokens t, t + 16, ... are summed in order, then the 16 sums by halves.
  float v[E * KEPT] = {}, low[E], high[E];
  for (int r = 0; r < E; r++)
    low[r] = high[r] = 0.0f;
  for (int t0 = 0; t0 < p.block; t0 += PASS) {
    const long row = first + metal::min(t0 + mine, p.block - 1);
    const int rows = (p.block - t0 - int(sg) + HADAMARD_SIMDGROUPS - 1) / HADAMARD_SIMDGROUPS;
    hadamard_rotate<D, M, LANES>(v, x, signs, quads, flips, row, lane, p);
    if (LANES == 32 && t0 % 16 != 0)
      hadamard_gather<D, LANES>(high, low, v, 0, lane, rows);
    else
      hadamard_gather<D, LANES>(low, high, v, (threadgroup float*)stages + sg * KEPT * 36, lane,
                                rows);
  }
  hadamard_table<D, 32 * HADAMARD_SIMDGROUPS>(table, centroids, tid, p.bits, p.root);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = 0; r < E; r++)
    low[r] += high[r];
  for (int h = HADAMARD_SIMDGROUPS / 2; h > 0; h /= 2) {
    if (int(sg) >= h && int(sg) < 2 * h) {
      for (int r = 0; r < E; r++)
        shared[((int(sg) - h) * E + r) * 32 + int(lane)] = low[r];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(sg) < h) {
      for (int r = 0; r < E; r++)
        low[r] += shared[(int(sg) * E + r) * 32 + int(lane)];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (sg == 0) {
    float most = 0.0f;
    for (int r = 0; r < E; r++) {
      low[r] *= p.share;
      low[r] = metal::isfinite(low[r]) ? low[r] : 0.0f;
      most = metal::max(most, metal::abs(low[r]));
    }
    const bfloat stored = bfloat(metal::simd_max(most) / 127.0f);
    const float unit = float(stored);
    for (int r = 0; r < E; r++) {
      const int c = 32 * r + int(lane);
      const float steps = unit > 0.0f ? metal::rint(low[r] / unit) : 0.0f;
      const float q = metal::clamp(steps, -127.0f, 127.0f);
      shared[c] = q * unit;
      if (c < D)
        centres[long(tgid.x) * D + c] = char(int(q));
    }
    if (lane == 0)
      centre_scales[tgid.x] = stored;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int t0 = 0; t0 < p.block; t0 += PASS) {
    const long row = first + metal::min(t0 + mine, p.block - 1);
    if (p.block > PASS)
      hadamard_rotate<D, M, LANES>(v, x, signs, quads, flips, row, lane, p);
    UNROLL
    for (int i = 0; i < E * KEPT; i++)
      v[i] -= shared[32 * (i / KEPT) + KEPT * int(lane % LANES) + i % KEPT];
    const bool live = t0 + mine < p.block;
    const HadamardSums sums = hadamard_encode<D, LANES>(v, hadamard_search(table, p.bits), table,
                                                        packed, row, live, lane, p);
    if (live && lane % LANES == 0)
      scales[row] = hadamard_scale(sums, p);
  }
}

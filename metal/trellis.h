// Trellis codes of rows: the path of least squared error through a bitshift trellis (Viterbi).
// Host side: csrc/trellis/launch.cpp.
//
// One simdgroup per row; lane l holds the costs of states 8 l to 8 l + 7. The state of a value is
// the 8 bits at bit B t of the row's stream, so its predecessors are the 2^B states that differ in
// their B lowest bits only: one minimum serves the 2^B successors of such a group.
#pragma once

#include "hadamard_quantize.h"
#include "params.h"
#include "prelude.h"

#define TRELLIS_STATES 256
// What the rows of a threadgroup have together: as many rows as fit, each of a multiple of 8.
#define TRELLIS_VALUES 640
#define TRELLIS_SIMDGROUPS 4

// The state of lowest cost, the lower one of two that tie; state 0 where costs are NaN.
METAL_FUNC uint trellis_last_state(thread const float* cost, uint lane) {
  float least = cost[0];
  uint state = 8 * lane;
  for (int i = 1; i < 8; i++) {
    const bool less = cost[i] < least;
    least = less ? cost[i] : least;
    state = less ? 8 * lane + uint(i) : state;
  }
  for (int h = 1; h < 32; h *= 2) {
    const float other = simd_shuffle_xor(least, ushort(h));
    const uint at = simd_shuffle_xor(state, ushort(h));
    const bool less = other < least || (other == least && at < state);
    least = less ? other : least;
    state = less ? at : state;
  }
  return metal::simd_broadcast(state, ushort(0));
}

// Cheapest predecessors of the groups of a lane: their costs go to `minima`, the B lowest bits of
// the states are returned, group by group.
template <int B>
METAL_FUNC uint trellis_predecessors(thread const float* cost, threadgroup float* minima,
                                     uint lane) {
  constexpr int HELD = B < 4 ? 8 >> B : 1, SIZE = B < 4 ? 1 << B : 8;
  uint choices = 0;
  for (int q = 0; q < HELD; q++) {
    float least = cost[q * SIZE];
    uint choice = 0;
    for (int j = 1; j < SIZE; j++) {
      const bool less = cost[q * SIZE + j] < least;
      least = less ? cost[q * SIZE + j] : least;
      choice = less ? uint(j) : choice;
    }
    if (B == 4) {  // a group is that of two lanes
      const bool upper = (lane & 1) != 0;
      const float other = simd_shuffle_xor(least, ushort(1));
      const uint others = simd_shuffle_xor(choice, ushort(1));
      const float low = upper ? other : least, high = upper ? least : other;
      const bool less = high < low;
      least = less ? high : low;
      choice = less == upper ? choice : others;
      choice += less ? 8u : 0u;
      if (!upper)
        minima[lane / 2] = least;
    } else {
      minima[int(lane) * HELD + q] = least;
    }
    choices |= choice << (B * q);
  }
  return choices;
}

template <int B>
kernel void trellis_encode(device const float* x [[buffer(0)]],
                           device const float* table [[buffer(1)]],
                           device uchar* codes [[buffer(2)]], device bfloat* scales [[buffer(3)]],
                           constant TrellisParams& p [[buffer(4)]],
                           uint3 tgid [[threadgroup_position_in_grid]],
                           uint tid [[thread_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int GROUPS = TRELLIS_STATES >> B;
  threadgroup_array(float, values, TRELLIS_VALUES);
  threadgroup_array(float, minima, TRELLIS_SIMDGROUPS * 2 * GROUPS);  // of even and odd steps
  threadgroup_array(uint, choices, TRELLIS_VALUES * 4);  // 4 bits of each lane and step
  threadgroup_array(uchar, states, TRELLIS_VALUES);
  const long row = long(tgid.x) * p.simdgroups + sg;
  if (row >= p.rows)
    return;
  const int room = (p.width + 7) / 8 * 8;
  threadgroup float* u = values + int(sg) * room;
  threadgroup uint* back = choices + int(sg) * room * 4;
  threadgroup uchar* path = states + int(sg) * room;
  device const float* y = x + row * p.width;

  float part = 0.0f;
  for (int c = int(lane); c < p.width; c += 32) {
    const float square = y[c] * y[c];
    part += square;
  }
  const float norm2 = metal::simd_sum(part);
  float factor = norm2 > 0.0f ? p.root / metal::sqrt(norm2) : 0.0f;
  if (!metal::isfinite(norm2))
    factor = NAN;  // every cost is NaN: the path is that of states 0
  for (int c = int(lane); c < p.width; c += 32)
    u[c] = y[c] * factor;
  simdgroup_barrier(mem_flags::mem_threadgroup);

  float level[8], cost[8];
  for (int i = 0; i < 8; i++) {
    level[i] = table[8 * int(lane) + i];
    const float d = u[0] - level[i];
    cost[i] = d * d;
  }
  uint word = 0;
  for (int t = 1; t < p.width; t++) {
    threadgroup float* least = minima + (sg * 2 + uint(t) % 2) * GROUPS;
    word |= trellis_predecessors<B>(cost, least, lane) << (4 * (t % 8));
    if (t % 8 == 7 || t + 1 == p.width) {
      back[t / 8 * 32 + int(lane)] = word;
      word = 0;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float v = u[t];
    UNROLL
    for (int i = 0; i < 8; i++) {
      const float d = v - level[i];
      const float square = d * d;
      cost[i] = least[(8 * int(lane) + i) % GROUPS] + square;
    }
  }
  uint state = trellis_last_state(cost, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);

  for (int t = p.width - 1; t >= 0; t--) {
    if (lane == 0)
      path[t] = uchar(state);
    if (t > 0) {
      const uint group = state % GROUPS;
      const uint holder = B < 4 ? group * (1 << B) / 8 : 2 * group;
      const uint shift = 4 * (uint(t) % 8) + (B < 4 ? B * (group % (8 >> B)) : 0);
      const uint choice = (back[t / 8 * 32 + int(holder)] >> shift) % (1u << B);
      state = group << B | choice;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  float dot = 0.0f, square = 0.0f;
  for (int c = int(lane); c < p.width; c += 32) {
    const float v = table[path[c]];
    const float product = y[c] * v, level2 = v * v;
    dot += product;
    square += level2;
  }
  dot = metal::simd_sum(dot);
  square = metal::simd_sum(square);
  if (lane == 0)
    scales[row] = bfloat(hadamard_row_scale(p.kind, norm2, dot, square, p.root));

  device uchar* bytes = codes + row * p.bytes;
  for (int k = int(lane); k < p.bytes; k += 32) {
    const int t = metal::min(8 * k / B, p.width - 1);
    uint bits = path[t];
    if (t + 1 < p.width)
      bits |= uint(path[t + 1]) >> (8 - B) << 8;
    bytes[k] = uchar((bits >> (8 * k - B * t)) & 0xff);
  }
}

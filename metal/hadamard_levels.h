// The level of a value: which one it is nearest to, by cells or by a tree of bounds, in threadgroup
// memory. The code of a value is the number of bounds below it, a bound being the middle between
// neighbouring levels.
//
// A cell is an interval of a monotone function of the value. The bounds in lower cells are below
// the value, those in higher ones are not, so that where no cell has two bounds one comparison with
// that of the value's cell is left. Where one has, and for codes of 8 bits, a complete tree takes
// the place of the cells: node n has the children 2 n and 2 n + 1, the levels are its leaves.
#pragma once

#include "params.h"
#include "prelude.h"

// Of the table: nodes of the tree, then its leaves, the levels; for up to 4 bits then the bounds of
// the cells, four times the number of bounds in lower cells, and what the function of cells needs.
#define HADAMARD_TABLE 512
#define HADAMARD_CELLS 32
#define HADAMARD_BOUNDS 32
#define HADAMARD_BELOW (HADAMARD_BOUNDS + HADAMARD_CELLS)
#define HADAMARD_SLOPE (HADAMARD_BELOW + HADAMARD_CELLS)
#define HADAMARD_OFFSET (HADAMARD_SLOPE + 1)
#define HADAMARD_BY_CELLS (HADAMARD_SLOPE + 2)

enum HadamardSearch { HADAMARD_BY_CELL, HADAMARD_BY_TREE, HADAMARD_BY_WIDE_TREE };

// Four times the cell of u. The spacing of floats from 2^21 to 2^22 is 1/4.
METAL_FUNC uint hadamard_cell(float u, float slope, float offset) {
  const float part = metal::saturate(metal::fma(u, slope, offset));
  return as_type<uint>(metal::fma(part, HADAMARD_CELLS - 0.25f, 2097152.0f)) &
         (4 * HADAMARD_CELLS - 4);
}

METAL_FUNC float hadamard_bound(device const float* centroids, uint i) {
  return 0.5f * (centroids[i] + centroids[i + 1]) + 0.0f;  // no bound is -0
}

// The cells, by one simdgroup.
METAL_FUNC void hadamard_cells(threadgroup float* table, device const float* centroids, uint lane,
                               int bits) {
  const uint bounds = (1u << bits) - 1;
  const float bound = hadamard_bound(centroids, metal::min(lane, bounds - 1));
  const float first = metal::simd_broadcast(bound, ushort(0));
  const float last = metal::simd_broadcast(bound, ushort(31));
  const float slope = last > first ? 1.0f / (last - first) : 1.0f, offset = -first * slope;
  const uint cell = hadamard_cell(bound, slope, offset) / 4;
  uint taken = 1u << cell;  // bit c: cell c has a bound
  for (int h = 1; h < 32; h *= 2)
    taken |= metal::simd_shuffle_xor(taken, ushort(h));
  const bool apart =
      metal::popcount(taken) == bounds && metal::isfinite(slope) && metal::isfinite(offset);
  table[HADAMARD_BOUNDS + lane] = INFINITY;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (apart && lane < bounds)
    table[HADAMARD_BOUNDS + cell] = bound;
  table[HADAMARD_BELOW + lane] = as_type<float>(4 * metal::popcount(taken & ((1u << lane) - 1)));
  if (lane == 0) {
    table[HADAMARD_SLOPE] = slope;
    table[HADAMARD_OFFSET] = offset;
    table[HADAMARD_BY_CELLS] = apart ? 1.0f : 0.0f;
  }
}

// Fills the table; a barrier must follow. There are 256 leaves for codes of 8 bits and 16 for
// shorter ones; bounds that there are not are infinite.
METAL_FUNC void hadamard_table(threadgroup float* table, device const float* centroids, uint tid,
                               int bits) {
  const uint levels = 1u << bits, leaves = bits == 8 ? 256 : 16;
  if (tid < leaves) {
    table[leaves + tid] = tid < levels ? centroids[tid] : 0.0f;
    if (tid > 0) {
      const uint below = metal::ctz(tid);  // levels of the tree
      table[(leaves >> (below + 1)) + (tid >> (below + 1))] =
          tid < levels ? hadamard_bound(centroids, tid - 1) : INFINITY;
    }
  }
  if (bits < 8 && tid < 32)
    hadamard_cells(table, centroids, tid, bits);
}

METAL_FUNC int hadamard_search(threadgroup const float* table, int bits) {
  return bits == 8                          ? HADAMARD_BY_WIDE_TREE
         : table[HADAMARD_BY_CELLS] != 0.0f ? HADAMARD_BY_CELL
                                            : HADAMARD_BY_TREE;
}

// A child of a node: that to which u belongs. The sign of a difference is cheaper than what a
// comparison gives; u is no NaN.
METAL_FUNC uint hadamard_child(uint node, float bound, float u) {
  return node << 1 | as_type<uint>(bound - u) >> 31;
}

// What a thread keeps of the table.
struct HadamardLevels {
  threadgroup const float* table;
  float3 top;  // nodes 1 to 3 of the tree
  float slope, offset;
};

template <int SEARCH>
METAL_FUNC HadamardLevels hadamard_levels(threadgroup const float* table) {
  HadamardLevels l;
  l.table = table;
  if (SEARCH == HADAMARD_BY_CELL) {
    l.slope = table[HADAMARD_SLOPE];
    l.offset = table[HADAMARD_OFFSET];
  } else {
    l.top = float3(table[1], table[2], table[3]);
  }
  return l;
}

METAL_FUNC float hadamard_at(threadgroup const float* table, int first, uint bytes) {
  return *(threadgroup const float*)((threadgroup const uchar*)(table + first) + bytes);
}

// Four times the code of u, and its level.
template <int SEARCH>
METAL_FUNC uint hadamard_code(float u, thread const HadamardLevels& l, thread float& level) {
  constexpr int STEPS = SEARCH == HADAMARD_BY_WIDE_TREE ? 8 : 4;
  uint code4;
  if (SEARCH == HADAMARD_BY_CELL) {
    const uint cell = hadamard_cell(u, l.slope, l.offset);
    code4 = as_type<uint>(hadamard_at(l.table, HADAMARD_BELOW, cell));
    if (hadamard_at(l.table, HADAMARD_BOUNDS, cell) < u)
      code4 += 4;
  } else {
    uint node = hadamard_child(0, l.top.x, u);
    node = hadamard_child(node, l.top.x < u ? l.top.z : l.top.y, u);
    UNROLL
    for (int i = 2; i < STEPS; i++)
      node = hadamard_child(node, l.table[(1 << i) + node], u);
    code4 = 4 * node;
  }
  level = hadamard_at(l.table, 1 << STEPS, code4);
  return code4;
}

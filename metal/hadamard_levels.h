// The level of a value: which one it is nearest to, by cells or by a tree of bounds, in threadgroup
// memory. The code of a value is the number of bounds below it, a bound being the middle between
// neighbouring levels.
//
// A cell is an interval of a row's values in units of their root mean square, none of which is
// beyond +-sqrt(D). The bounds in lower cells are below the value, those in higher ones are not, so
// that where no cell has two bounds one comparison with that of the value's cell is left. Where one
// has, and for codes of 8 bits, a complete tree takes the place of the cells: node n has the
// children 2 n and 2 n + 1, the levels are its leaves.
#pragma once

#include "params.h"
#include "prelude.h"

// Of the table: nodes of the tree, then its leaves, the levels; for up to 4 bits then the bounds of
// the cells, and four times the number of bounds in lower cells. Entry 0, which is no node, is what
// values times their factor are multiplied by to count cells, or 0: no search by cells.
#define HADAMARD_CELLS(D) ((D) <= 64 ? 64 : (D) <= 256 ? 128 : 256)  // of 1/4 at most
#define HADAMARD_BOUNDS 32
#define HADAMARD_BELOW(D) (HADAMARD_BOUNDS + HADAMARD_CELLS(D))
#define HADAMARD_TABLE 544

enum HadamardSearch { HADAMARD_BY_CELL, HADAMARD_BY_TREE, HADAMARD_BY_WIDE_TREE };

// Four times the cell of x. The spacing of floats from 2^21 to 2^22 is 1/4.
template <int D>
METAL_FUNC uint hadamard_cell(float x, float slope) {
  constexpr int CELLS = HADAMARD_CELLS(D);
  return as_type<uint>(metal::fma(x, slope, 2097152.0f + CELLS / 2)) & (4 * CELLS - 4);
}

METAL_FUNC float hadamard_bound(device const float* centroids, uint i) {
  const float bound = 0.5f * (centroids[i] + centroids[i + 1]) + 0.0f;  // no bound is -0
  return metal::isnan(bound) ? INFINITY : bound;  // of -inf and inf: no value is above it
}

// The cells, by whole simdgroups: those of threads from tid on. Bounds keep a distance from the
// ends of their cells, as a value's cell is calculated in another way than that of a bound.
template <int D, int THREADS>
METAL_FUNC void hadamard_cells(threadgroup float* table, device const float* centroids, uint tid,
                               int bits, float root) {
  constexpr int CELLS = HADAMARD_CELLS(D);
  const uint lane = tid % 32;
  const int bounds = (1 << bits) - 1;
  const float slope = CELLS / 2 / (1.01f * root);
  const float bound = hadamard_bound(centroids, metal::min(lane, uint(bounds - 1)));
  const float place = metal::fma(bound, slope, CELLS / 2 + 0.125f);
  const float cell = metal::floor(place), rest = place - cell;
  const float before = metal::simd_shuffle_up(cell, ushort(1));
  const bool apart =
      cell > (lane > 0 ? before : 0.0f) && cell < CELLS && rest > 1.0e-4f && rest < 0.9999f;
  const bool all = metal::simd_all(apart || int(lane) >= bounds);
  for (int first = 0; first < CELLS; first += THREADS) {
    const int mine = first + int(tid);
    float inside = INFINITY;
    uint below = 0;
    for (int i = 0; i < bounds; i++) {
      const float other = metal::simd_broadcast(cell, ushort(i));
      const float its = metal::simd_broadcast(bound, ushort(i));
      inside = other == float(mine) ? its : inside;
      below += other < float(mine) ? 4 : 0;
    }
    if (mine < CELLS) {
      table[HADAMARD_BOUNDS + mine] = inside;
      table[HADAMARD_BELOW(D) + mine] = as_type<float>(below);
    }
  }
  if (tid == 0)
    table[0] = all ? slope : 0.0f;
}

// Fills the table; a barrier must follow. There are 256 leaves for codes of 8 bits and 16 for
// shorter ones; bounds that there are not are infinite.
template <int D, int THREADS>
METAL_FUNC void hadamard_table(threadgroup float* table, device const float* centroids, uint tid,
                               int bits, float root) {
  const uint levels = 1u << bits, leaves = bits == 8 ? 256 : 16;
  for (uint i = tid; i < leaves; i += THREADS) {
    table[leaves + i] = i < levels ? centroids[i] : 0.0f;
    if (i > 0) {
      const uint below = metal::ctz(i);  // levels of the tree
      table[(leaves >> (below + 1)) + (i >> (below + 1))] =
          i < levels ? hadamard_bound(centroids, i - 1) : INFINITY;
    }
  }
  if (bits < 8)
    hadamard_cells<D, THREADS>(table, centroids, tid, bits, root);
}

METAL_FUNC int hadamard_search(threadgroup const float* table, int bits) {
  return bits == 8 ? HADAMARD_BY_WIDE_TREE : table[0] != 0.0f ? HADAMARD_BY_CELL : HADAMARD_BY_TREE;
}

// A child of a node: that to which u belongs. The sign of a difference is cheaper than what a
// comparison gives; u is no NaN.
METAL_FUNC uint hadamard_child(uint node, float bound, float u) {
  return node << 1 | as_type<uint>(bound - u) >> 31;
}

// What a thread keeps of the table, and a factor of a row's values.
struct HadamardLevels {
  threadgroup const float* table;
  float3 top;  // nodes 1 to 3 of the tree
  float factor, slope;
};

template <int SEARCH>
METAL_FUNC HadamardLevels hadamard_levels(threadgroup const float* table, float factor) {
  HadamardLevels l;
  l.table = table;
  l.factor = factor;
  if (SEARCH == HADAMARD_BY_CELL)
    l.slope = factor * table[0];
  else
    l.top = float3(table[1], table[2], table[3]);
  return l;
}

METAL_FUNC float hadamard_at(threadgroup const float* table, int first, uint bytes) {
  return *(threadgroup const float*)((threadgroup const uchar*)(table + first) + bytes);
}

// Four times the code of x, and its level.
template <int D, int SEARCH>
METAL_FUNC uint hadamard_code(float x, thread const HadamardLevels& l, thread float& level) {
  constexpr int STEPS = SEARCH == HADAMARD_BY_WIDE_TREE ? 8 : 4;
  const float u = x * l.factor;
  uint code4;
  if (SEARCH == HADAMARD_BY_CELL) {
    const uint cell = hadamard_cell<D>(x, l.slope);
    code4 = as_type<uint>(hadamard_at(l.table, HADAMARD_BELOW(D), cell));
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

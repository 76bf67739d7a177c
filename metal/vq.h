// Nearest codebook row of each sub-vector, and rows by index. Host side: csrc/vq/launch.cpp.
#pragma once

#include "params.h"
#include "prelude.h"

// Floats of codebook staged in threadgroup memory at a time (16 KiB).
#define VQ_STAGE 4096
#define VQ_THREADS 128
#define VQ_PER_THREAD 4
#define VQ_GROUP 8  // rows of which the nearest is sought together, a power of two

// Position in [outer, heads, seq, groups] of the i-th vector that uses codebook (head, group).
METAL_FUNC long vq_position(constant VqParams& p, long i, long head, long group) {
  if (!p.per_head && !p.per_group)
    return i;
  long g = group;
  if (!p.per_group) {
    g = i % p.groups;
    i /= p.groups;
  }
  long s = i % p.seq;
  i /= p.seq;
  long h = head;
  if (!p.per_head) {
    h = i % p.heads;
    i /= p.heads;
  }
  return ((i * p.heads + h) * p.seq + s) * p.groups + g;
}

// Row k of the staged codebook, read as vectors.
template <int D>
METAL_FUNC void vq_row(thread float* c, threadgroup const float4* stage, int k) {
  if (D == 2) {
    const float2 pair = ((threadgroup const float2*)stage)[k];
    c[0] = pair.x;
    c[1] = pair.y;
  } else {
    UNROLL
    for (int j = 0; j < D / 4; j++) {
      const float4 four = stage[k * (D / 4) + j];
      c[4 * j] = four.x;
      c[4 * j + 1] = four.y;
      c[4 * j + 2] = four.z;
      c[4 * j + 3] = four.w;
    }
  }
}

template <int D>
METAL_FUNC float vq_distance(thread const float* x, thread const float* c) {
  float d = 0.0f;
  UNROLL
  for (int j = 0; j < D; j++) {
    const float t = x[j] - c[j];
    d = metal::fma(t, t, d);
  }
  return d;
}

// The nearest row to one vector by its distances to all: of equal ones the first. best and code
// hold what earlier stages gave, the first of which has index k0.
template <int D>
METAL_FUNC void vq_search_all(thread const float* v, thread float& best, thread uint& code,
                              threadgroup const float4* stage, int rows, int k0) {
  for (int k = 0; k < rows; k++) {
    float c[D];
    vq_row<D>(c, stage, k);
    const float d = vq_distance<D>(v, c);
    const bool closer = d < best;  // false for NaN
    best = closer ? d : best;
    code = closer ? uint(k0 + k) : code;
  }
}

// The same among VQ_GROUP rows from `from` on.
template <int D>
METAL_FUNC void vq_search_group(thread const float* v, thread float& best, thread uint& code,
                                threadgroup const float4* stage, int from, int k0, uint lane) {
  float d[VQ_GROUP], least = INFINITY;
  UNROLL
  for (int i = 0; i < VQ_GROUP; i++) {
    float c[D];
    vq_row<D>(c, stage, from + (i + int(lane)) % VQ_GROUP);  // lanes read different banks
    d[i] = metal::min(vq_distance<D>(v, c), INFINITY);       // no NaN
    least = metal::min(least, d[i]);
  }
  uint farther = 0;
  UNROLL
  for (int i = VQ_GROUP - 1; i >= 0; i--)
    farther = farther << 1 | as_type<uint>(least - d[i]) >> 31;
  const uint near = (~farther & 255) * 257 << lane % VQ_GROUP >> 8;
  const int first = int(metal::ctz(near & 255));
  code = least < best ? uint(k0 + from + first) : code;
  best = metal::min(best, least);
}

// What scores |c|^2 / 2 - <x, c> of two rows may differ by though their distances, as computed, are
// in the other order. A score is off by at most 1.5 D u (|x|^2 + |c|^2), half a distance by (D + 2)
// u times the same, u = 2^-24; `most` is the largest |c|^2 / 2. The constant is for underflow.
template <int D>
METAL_FUNC float vq_margin(thread const float* v, float most) {
  float norm2 = 0.0f;
  UNROLL
  for (int j = 0; j < D; j++)
    norm2 = metal::fma(v[j], v[j], norm2);
  return (3 * D + 4) * 1.35e-7f * (norm2 + 2.0f * most) + 1.0e-36f;
}

// The nearest of the staged rows to each vector. Of each VQ_GROUP rows only the least score is
// kept, which takes half the operations of distances; then distances say which row of the best
// group it is, or of all rows where another group is too close. halves: |c|^2 / 2, at most `most`.
template <int D>
METAL_FUNC void vq_search(thread const float* v, thread float* best, thread uint* code,
                          threadgroup const float4* stage, threadgroup const float4* halves,
                          float most, int rows, int k0, uint lane) {
  int from[VQ_PER_THREAD];  // first row of the group
  float low[VQ_PER_THREAD], second[VQ_PER_THREAD];
  UNROLL
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    from[r] = 0;
    low[r] = second[r] = INFINITY;
  }
  for (int k = 0; k < rows; k += VQ_GROUP) {
    float least[VQ_PER_THREAD];
    UNROLL
    for (int i = 0; i < VQ_GROUP; i++) {
      float c[D > 2 ? D : 4];
      if (D == 2) {  // two rows at a time
        vq_row<4>(c, stage, k / 2 + i / 2);
        c[0] = i % 2 == 0 ? c[0] : c[2];
        c[1] = i % 2 == 0 ? c[1] : c[3];
      } else {
        vq_row<D>(c, stage, k + i);
      }
      const float4 four = halves[k / 4 + i / 4];
      const float start = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
      UNROLL
      for (int r = 0; r < VQ_PER_THREAD; r++) {
        float s = start;
        UNROLL
        for (int j = 0; j < D; j++)
          s = metal::fma(-v[r * D + j], c[j], s);
        least[r] = i == 0 ? s : metal::min(least[r], s);  // of NaN and a number the number
      }
    }
    UNROLL
    for (int r = 0; r < VQ_PER_THREAD; r++) {
      second[r] = metal::min(second[r], metal::max(low[r], least[r]));
      from[r] = least[r] < low[r] ? k : from[r];
      low[r] = metal::min(low[r], least[r]);
    }
  }
  UNROLL
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    if (second[r] - low[r] > vq_margin<D>(v + r * D, most)) {
      vq_search_group<D>(v + r * D, best[r], code[r], stage, from[r], k0, lane);
    } else {
      vq_search_all<D>(v + r * D, best[r], code[r], stage, rows, k0);
    }
  }
}

// The same for any number of dimensions; x stays in device memory.
template <typename T>
METAL_FUNC void vq_search_any(device const T* x, thread const long* at, thread float* best,
                              thread uint* code, threadgroup const float* stage, int rows, int k0,
                              int dims) {
  for (int k = 0; k < rows; k++) {
    for (int r = 0; r < VQ_PER_THREAD; r++) {
      float d = 0.0f;
      for (int j = 0; j < dims; j++) {
        const float t = float(x[at[r] * dims + j]) - stage[k * dims + j];
        d = metal::fma(t, t, d);
      }
      const bool closer = d < best[r];
      best[r] = closer ? d : best[r];
      code[r] = closer ? uint(k0 + k) : code[r];
    }
  }
}

// One threadgroup takes 512 vectors of one codebook (grid.y). D is the number of dimensions, or 0
// for any number.
template <typename T, typename C, int D>
kernel void quantize_vq(device const T* x [[buffer(0)]], device const float* codebook [[buffer(1)]],
                        device C* codes [[buffer(2)]], constant VqParams& p [[buffer(3)]],
                        uint3 tgid [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int HELD = D > 0 ? D : 2;
  constexpr int ROWS = D > 0 ? VQ_STAGE / (D > 8 ? D : 8) : 4;
  threadgroup_array(float4, stage, VQ_STAGE / 4);
  threadgroup_array(float4, halves, ROWS / 4);
  threadgroup_array(float, largest, VQ_THREADS / 32);
  threadgroup float* values = (threadgroup float*)stage;
  const int dims = D > 0 ? D : p.dims;
  const int book_groups = p.per_group ? p.groups : 1;
  const long head = long(tgid.y) / book_groups, group = long(tgid.y) % book_groups;
  const long n = p.outer * (p.per_head ? 1 : p.heads) * p.seq * (p.per_group ? 1 : p.groups);
  const long first = long(tgid.x) * (VQ_THREADS * VQ_PER_THREAD) + tid;

  float v[VQ_PER_THREAD * HELD];
  long at[VQ_PER_THREAD];
  float best[VQ_PER_THREAD];
  uint code[VQ_PER_THREAD];
  UNROLL
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    // threads past the end repeat the last vector and store nothing
    const long i = metal::min(first + r * VQ_THREADS, n - 1);
    at[r] = vq_position(p, i, head, group);
    UNROLL
    for (int j = 0; j < D; j++)
      v[r * HELD + j] = float(x[at[r] * D + j]);
    best[r] = INFINITY;
    code[r] = 0;
  }

  device const float* book = codebook + long(tgid.y) * p.rows * dims;
  const int stage_rows = D > 0 ? ROWS : VQ_STAGE / dims;
  for (int k0 = 0; k0 < p.rows; k0 += stage_rows) {
    const int rows = metal::min(stage_rows, p.rows - k0);
    // whole groups: rows that are nobody's nearest
    const int padded = D > 0 ? (rows + VQ_GROUP - 1) / VQ_GROUP * VQ_GROUP : rows;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(tid); i < padded * dims; i += VQ_THREADS)
      values[i] = i < rows * dims ? book[long(k0) * dims + i] : INFINITY;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (D > 0) {
      float most = 0.0f;
      for (int k = int(tid); k < padded; k += VQ_THREADS) {
        float half_norm = 0.0f;
        UNROLL
        for (int j = 0; j < D; j++)
          half_norm = metal::fma(values[k * D + j], values[k * D + j], half_norm);
        half_norm *= 0.5f;
        ((threadgroup float*)halves)[k] = half_norm;
        most = k < rows ? metal::max(most, half_norm) : most;
      }
      most = metal::simd_max(most);
      if (lane == 0)
        largest[sg] = most;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL
      for (int i = 0; i < VQ_THREADS / 32; i++)
        most = metal::max(most, largest[i]);
      vq_search<HELD>(v, best, code, stage, halves, most, padded, k0, lane);
    } else {
      vq_search_any(x, at, best, code, values, rows, k0, dims);
    }
  }
  UNROLL
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    if (first + r * VQ_THREADS < n)
      codes[at[r]] = C(code[r]);
  }
}

// One thread per code; a code without a row gives NaN, which no reader can take for data.
template <typename T, typename C>
kernel void dequantize_vq(device const C* codes [[buffer(0)]],
                          device const T* codebook [[buffer(1)]], device T* out [[buffer(2)]],
                          constant VqParams& p [[buffer(3)]],
                          uint3 tgid [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint sg [[simdgroup_index_in_threadgroup]]) {
  const long i = long(tgid.x) * VQ_THREADS + tid;
  if (i >= p.outer * p.heads * p.seq * p.groups)
    return;
  const long g = p.per_group ? i % p.groups : 0;
  const long h = p.per_head ? i / p.groups / p.seq % p.heads : 0;
  const long book = (h * (p.per_group ? p.groups : 1) + g) * p.rows;
  const int c = int(codes[i]);
  device const T* row = codebook + (book + metal::min(c, p.rows - 1)) * p.dims;
  for (int j = 0; j < p.dims; j++)
    out[i * p.dims + j] = c < p.rows ? row[j] : T(NAN);
}

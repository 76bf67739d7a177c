// Nearest codebook row of each sub-vector, and rows by index. Host side: csrc/vq/launch.cpp.
#pragma once

#include "params.h"
#include "prelude.h"

// Floats of codebook staged in threadgroup memory at a time (16 KiB).
#define VQ_STAGE 4096
#define VQ_THREADS 256
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

// The nearest of the staged rows to each vector, first by groups of VQ_GROUP rows, of which only
// the least distance is kept; then the row of the best group by computing its distances again. best
// and code hold what earlier stages gave, the first of which has index k0.
template <int D>
METAL_FUNC void vq_search(thread const float* v, thread float* best, thread uint* code,
                          threadgroup const float4* stage, int rows, int k0, uint lane) {
  int from[VQ_PER_THREAD];  // first row of the group
  UNROLL
  for (int r = 0; r < VQ_PER_THREAD; r++)
    from[r] = -1;
  for (int k = 0; k < rows; k += VQ_GROUP) {
    float least[VQ_PER_THREAD];
    UNROLL
    for (int i = 0; i < VQ_GROUP; i++) {
      float c[D];
      vq_row<D>(c, stage, k + i);
      UNROLL
      for (int r = 0; r < VQ_PER_THREAD; r++) {
        const float d = vq_distance<D>(v + r * D, c);
        least[r] = i == 0 ? d : metal::min(least[r], d);  // of NaN and a number the number
      }
    }
    UNROLL
    for (int r = 0; r < VQ_PER_THREAD; r++) {
      const bool closer = least[r] < best[r];  // false for NaN; ties keep the lower index
      best[r] = closer ? least[r] : best[r];
      from[r] = closer ? k : from[r];
    }
  }
  UNROLL
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    if (from[r] >= 0) {
      int first = VQ_GROUP;
      for (int i = 0; i < VQ_GROUP; i++) {
        const int at = (i + int(lane)) % VQ_GROUP;  // lanes read different banks
        float c[D];
        vq_row<D>(c, stage, from[r] + at);
        first = vq_distance<D>(v + r * D, c) == best[r] ? metal::min(first, at) : first;
      }
      code[r] = uint(k0 + from[r] + first);
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

// One threadgroup takes 1024 vectors of one codebook (grid.y). D is the number of dimensions, or 0
// for any number.
template <typename T, typename C, int D>
kernel void quantize_vq(device const T* x [[buffer(0)]], device const float* codebook [[buffer(1)]],
                        device C* codes [[buffer(2)]], constant VqParams& p [[buffer(3)]],
                        uint3 tgid [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int HELD = D > 0 ? D : 2;
  threadgroup_array(float4, stage, VQ_STAGE / 4);
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
  const int stage_rows = VQ_STAGE / dims;
  for (int k0 = 0; k0 < p.rows; k0 += stage_rows) {
    const int rows = metal::min(stage_rows, p.rows - k0);
    // whole groups: rows that are nobody's nearest
    const int padded = D > 0 ? (rows + VQ_GROUP - 1) / VQ_GROUP * VQ_GROUP : rows;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(tid); i < padded * dims; i += VQ_THREADS)
      values[i] = i < rows * dims ? book[long(k0) * dims + i] : INFINITY;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (D > 0)
      vq_search<HELD>(v, best, code, stage, padded, k0, lane);
    else
      vq_search_any(x, at, best, code, values, rows, k0, dims);
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

// Nearest codebook row of each sub-vector, and rows by index. Host side: csrc/vq/launch.cpp.
#pragma once

#include "params.h"
#include "prelude.h"

// Floats of codebook staged in threadgroup memory at a time: where dimensions are held in
// registers, and otherwise.
#define VQ_STAGE 2048
#define VQ_STAGE_ANY 4096
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

// How the nearest row is found with four operations per row and vector where the distance takes
// eight. Relative to an origin o among the rows, with a = x - o and b = c - o, half the squared
// distance is |a|^2 / 2 plus the score |b|^2 / 2 - a b, for which there is one fma per dimension. A
// pass over groups of VQ_GROUP rows keeps the group with the least score, and the least score of
// the other groups. Scores and distances err by less than VQ_MARGIN (|a|^2 + max |b|^2), both
// together, since a and b are differences that round once; if the two scores differ by more, the
// nearest row is in that group, and otherwise (or if they are not finite) it may be anywhere. What
// decides are the distances of these rows.
#define VQ_MARGIN(D) (1.0f / ((D) > 4 ? 262144 : 524288))  // 2^-18, 2^-19
#define VQ_LEAST_MARGIN 1e-30f  // above what numbers lose that are nearly zero

// Stages rows, padded to whole groups by rows that are nobody's nearest: `shifted` are those of the
// scores, `half_norms` |b|^2 / 2. Gives the largest of those that the thread staged.
template <int D>
METAL_FUNC float vq_stage(threadgroup float* stage, threadgroup float* shifted,
                          threadgroup float* half_norms, device const float* book,
                          thread const float* origin, int rows, uint tid) {
  const int padded = (rows + VQ_GROUP - 1) / VQ_GROUP * VQ_GROUP;
  float most = 0.0f;
  for (int k = int(tid); k < padded; k += VQ_THREADS) {
    float norm = 0.0f;
    UNROLL
    for (int j = 0; j < D; j++) {
      const float c = k < rows ? book[k * D + j] : INFINITY;
      const float b = k < rows ? c - origin[j] : 0.0f;
      stage[k * D + j] = c;
      shifted[k * D + j] = b;
      norm = metal::fma(b, b, norm);
    }
    most = metal::max(most, 0.5f * norm);
    half_norms[k] = k < rows ? 0.5f * norm : INFINITY;
  }
  return most;
}

// The nearest of `rows` staged rows to each vector. best and code hold what earlier stages gave;
// the index of the first row is k0.
template <typename T, int D>
METAL_FUNC void vq_search(device const T* x, thread const long* at, thread const float* origin,
                          thread float* best, thread uint* code, threadgroup const float4* stage,
                          threadgroup const float4* shifted, threadgroup const float4* half_norms,
                          float most, int rows, int k0, uint lane) {
  float a[VQ_PER_THREAD * D];  // negative
  float least[VQ_PER_THREAD], second[VQ_PER_THREAD];
  int from[VQ_PER_THREAD];  // first row of the group
  UNROLL
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    UNROLL
    for (int j = 0; j < D; j++)
      a[r * D + j] = origin[j] - float(x[at[r] * D + j]);
    least[r] = second[r] = INFINITY;
    from[r] = 0;
  }
  for (int k = 0; k < rows; k += VQ_GROUP) {
    float score[VQ_PER_THREAD];
    float half_norm[VQ_GROUP];
    UNROLL
    for (int i = 0; i < VQ_GROUP / 4; i++) {
      const float4 four = half_norms[k / 4 + i];
      half_norm[4 * i] = four.x;
      half_norm[4 * i + 1] = four.y;
      half_norm[4 * i + 2] = four.z;
      half_norm[4 * i + 3] = four.w;
    }
    UNROLL
    for (int i = 0; i < VQ_GROUP; i++) {
      float b[D];
      vq_row<D>(b, shifted, k + i);
      UNROLL
      for (int r = 0; r < VQ_PER_THREAD; r++) {
        float s = half_norm[i];
        UNROLL
        for (int j = 0; j < D; j++)
          s = metal::fma(a[r * D + j], b[j], s);
        score[r] = i == 0 ? s : metal::min(score[r], s);
      }
    }
    UNROLL
    for (int r = 0; r < VQ_PER_THREAD; r++) {
      from[r] = score[r] < least[r] ? k : from[r];
      second[r] = metal::min(second[r], metal::max(least[r], score[r]));
      least[r] = metal::min(least[r], score[r]);
    }
  }
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    float y[D], norm = 2.0f * most;
    UNROLL
    for (int j = 0; j < D; j++) {
      y[j] = float(x[at[r] * D + j]);
      norm = metal::fma(a[r * D + j], a[r * D + j], norm);
    }
    // false if anything is NaN
    const bool sure = second[r] - least[r] > VQ_MARGIN(D) * norm + VQ_LEAST_MARGIN;
    const int begin = sure ? from[r] : 0, count = sure ? VQ_GROUP : rows;
    float nearest = INFINITY;
    int row = rows;
    for (int i = 0; i < count; i++) {
      // lanes read different banks, so rows are not in order
      const int k = begin + (sure ? (i + int(lane)) % VQ_GROUP : i);
      float c[D];
      vq_row<D>(c, stage, k);
      const float d = vq_distance<D>(y, c);
      const bool closer = d < nearest || (d == nearest && k < row);  // false for NaN
      nearest = closer ? d : nearest;
      row = closer ? k : row;
    }
    if (nearest < best[r]) {
      best[r] = nearest;
      code[r] = uint(k0 + row);
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
// for any number. NaN is nobody's nearest, and ties keep the lower index.
template <typename T, typename C, int D>
kernel void quantize_vq(device const T* x [[buffer(0)]], device const float* codebook [[buffer(1)]],
                        device C* codes [[buffer(2)]], constant VqParams& p [[buffer(3)]],
                        uint3 tgid [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int HELD = D > 0 ? D : 2, STAGE = D > 0 ? VQ_STAGE : VQ_STAGE_ANY;
  threadgroup_array(float4, stage, STAGE / 4);
  threadgroup_array(float4, shifted, D > 0 ? STAGE / 4 : 1);
  threadgroup_array(float4, half_norms, D > 0 ? STAGE / HELD / 4 : 1);
  threadgroup_array(float, norms, VQ_THREADS / 32);
  const int dims = D > 0 ? D : p.dims;
  const int book_groups = p.per_group ? p.groups : 1;
  const long head = long(tgid.y) / book_groups, group = long(tgid.y) % book_groups;
  const long n = p.outer * (p.per_head ? 1 : p.heads) * p.seq * (p.per_group ? 1 : p.groups);
  const long first = long(tgid.x) * (VQ_THREADS * VQ_PER_THREAD) + tid;

  long at[VQ_PER_THREAD];
  float best[VQ_PER_THREAD];
  uint code[VQ_PER_THREAD];
  UNROLL
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    // threads past the end repeat the last vector and store nothing
    const long i = metal::min(first + r * VQ_THREADS, n - 1);
    at[r] = vq_position(p, i, head, group);
    best[r] = INFINITY;
    code[r] = 0;
  }

  device const float* book = codebook + long(tgid.y) * p.rows * dims;
  float origin[HELD];  // the mean of eight rows
  UNROLL
  for (int j = 0; j < D; j++) {
    origin[j] = 0.0f;
    UNROLL
    for (int i = 0; i < 8; i++)
      origin[j] += 0.125f * book[p.rows * i / 8 * D + j];
  }
  const int stage_rows = STAGE / dims;
  for (int k0 = 0; k0 < p.rows; k0 += stage_rows) {
    const int rows = metal::min(stage_rows, p.rows - k0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (D > 0) {
      const float most = metal::simd_max(
          vq_stage<HELD>((threadgroup float*)stage, (threadgroup float*)shifted,
                         (threadgroup float*)half_norms, book + long(k0) * D, origin, rows, tid));
      if (lane == 0)
        norms[sg] = most;
    } else {
      for (int i = int(tid); i < rows * dims; i += VQ_THREADS)
        ((threadgroup float*)stage)[i] = book[long(k0) * dims + i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (D > 0) {
      float most = norms[0];
      UNROLL
      for (int i = 1; i < VQ_THREADS / 32; i++)
        most = metal::max(most, norms[i]);
      vq_search<T, HELD>(x, at, origin, best, code, stage, shifted, half_norms, most,
                         (rows + VQ_GROUP - 1) / VQ_GROUP * VQ_GROUP, k0, lane);
    } else {
      vq_search_any(x, at, best, code, (threadgroup const float*)stage, rows, k0, dims);
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

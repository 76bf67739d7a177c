// Nearest codebook row of each sub-vector, and rows by index. Host side: csrc/vq/launch.cpp.
#pragma once

#include "params.h"
#include "prelude.h"

// Floats of codebook staged in threadgroup memory at a time (16 KiB).
#define VQ_STAGE 4096
#define VQ_THREADS 256
#define VQ_PER_THREAD 4

// Position in [outer, heads, seq, groups] of the i-th vector that uses codebook (head, group).
METAL_FUNC long vq_position(constant VqParams& p, long i, long head, long group) {
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

// One threadgroup takes 1024 vectors of one codebook (grid.y). D is the number of dimensions, or 0
// for any number: then x stays in device memory instead of registers.
template <typename T, typename C, int D>
kernel void quantize_vq(device const T* x [[buffer(0)]], device const float* codebook [[buffer(1)]],
                        device C* codes [[buffer(2)]], constant VqParams& p [[buffer(3)]],
                        uint3 tgid [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int HELD = D > 0 ? D : 1;
  threadgroup_array(float, stage, VQ_STAGE);
  const int dims = D > 0 ? D : p.dims;
  const int book_groups = p.per_group ? p.groups : 1;
  const long head = long(tgid.y) / book_groups, group = long(tgid.y) % book_groups;
  const long n = p.outer * (p.per_head ? 1 : p.heads) * p.seq * (p.per_group ? 1 : p.groups);
  const long first = long(tgid.x) * (VQ_THREADS * VQ_PER_THREAD) + tid;

  float v[VQ_PER_THREAD * HELD];
  long at[VQ_PER_THREAD];
  float best[VQ_PER_THREAD];
  uint code[VQ_PER_THREAD];
  for (int r = 0; r < VQ_PER_THREAD; r++) {
    // threads past the end repeat the last vector and store nothing
    const long i = metal::min(first + r * VQ_THREADS, n - 1);
    at[r] = vq_position(p, i, head, group);
    if (D > 0) {
      for (int j = 0; j < D; j++)
        v[r * HELD + j] = float(x[at[r] * D + j]);
    }
    best[r] = INFINITY;
    code[r] = 0;
  }

  device const float* book = codebook + long(tgid.y) * p.rows * dims;
  const int stage_rows = VQ_STAGE / dims;
  for (int k0 = 0; k0 < p.rows; k0 += stage_rows) {
    const int rows = metal::min(stage_rows, p.rows - k0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(tid); i < rows * dims; i += VQ_THREADS)
      stage[i] = book[long(k0) * dims + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < rows; k++) {
      for (int r = 0; r < VQ_PER_THREAD; r++) {
        float d = 0.0f;
        for (int j = 0; j < dims; j++) {
          const float xj = D > 0 ? v[r * HELD + (D > 0 ? j : 0)] : float(x[at[r] * dims + j]);
          const float t = xj - stage[k * dims + j];
          d = metal::fma(t, t, d);
        }
        const bool closer = d < best[r];  // false for NaN; ties keep the lower index
        best[r] = closer ? d : best[r];
        code[r] = closer ? uint(k0 + k) : code[r];
      }
    }
  }
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

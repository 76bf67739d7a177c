// Second pass of attention: merges the slices of a query row. Host side: csrc/attention/launch.cpp.
#pragma once

#include "attention.h"
#include "hadamard.h"

// What weights relative to the maximum m, with the sum l, are to be multiplied by.
// A sink is one more weight, of no value. A row without any weight gives zeros.
METAL_FUNC float softmax_share(constant AttentionParams& p, device const float* sinks, int head,
                               float m, float l) {
  if (p.sinks) {
    const float s = metal::max(sinks[head] * LOG2_E, ATTENTION_NEVER);
    const float top = metal::max(m, s);
    const float total = l * metal::exp2(m - top) + metal::exp2(s - top);
    return metal::exp2(m - top) / total;
  }
  return l > 0.0f ? 1.0f / l : 0.0f;
}

// One threadgroup merges the slices of one query row, and turns what the codes gave back into the
// basis of the values.
template <typename T>
kernel void attention_merge(
    device const float* part [[buffer(0)]], device const float* part_ml [[buffer(1)]],
    device const float* sinks [[buffer(2)]], device const float* value_diagonal [[buffer(3)]],
    device T* out [[buffer(4)]], device float* out_code [[buffer(5)]],
    device float* out_tail [[buffer(6)]], constant AttentionParams& p [[buffer(7)]],
    uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int HELD = (ATTENTION_MAX_WIDTH + ATTENTION_THREADS - 1) / ATTENTION_THREADS;
  threadgroup_array(float, sums, ATTENTION_SIMDS* ATTENTION_MAX_WIDTH);
  threadgroup_array(float, code, ATTENTION_MAX_WIDTH);
  threadgroup_array(float, weight, ATTENTION_MAX_SLICES);
  const long row = tgid.x;
  const int head = int(row / p.queries % p.heads), kv_head = head / (p.heads / p.kv_heads);
  const int all = p.splits + p.tail_splits;
  device const float* ml = part_ml + row * all * 2;
  float m = ATTENTION_NEVER;
  for (int s = int(lane); s < all; s += 32)
    m = metal::max(m, ml[s * 2]);
  m = simd_max(m);
  float l = 0.0f;
  for (int s = int(lane); s < all; s += 32) {
    const float w = metal::exp2(ml[s * 2] - m);
    l += ml[s * 2 + 1] * w;
    if (sg == 0)
      weight[s] = w;
  }
  const float share = softmax_share(p, sinks, head, m, simd_sum(l));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Simdgroups take the slices in turn, lanes four channels each; eight loads of each are under way
  // at a time. The slices of the tail are few.
  device const float* at = part + row * all * p.value_dim;
  for (int d = 4 * int(lane); d < p.value_dim; d += 128) {
    float4 a = float4(0.0f);
    for (int first = int(sg); first < p.splits; first += 8 * ATTENTION_SIMDS) {
      float4 x[8];
      UNROLL
      for (int i = 0; i < 8; i++) {
        device const float* from =
            at + metal::min(first + i * ATTENTION_SIMDS, p.splits - 1) * p.value_dim;
        x[i] = float4(from[d], from[metal::min(d + 1, p.value_dim - 1)],
                      from[metal::min(d + 2, p.value_dim - 1)],
                      from[metal::min(d + 3, p.value_dim - 1)]);
      }
      UNROLL
      for (int i = 0; i < 8; i++) {
        const int s = first + i * ATTENTION_SIMDS;
        a = a + x[i] * (s < p.splits ? weight[s] : 0.0f);
      }
    }
    for (int j = 0; j < 4 && d + j < p.value_dim; j++)
      sums[int(sg) * p.value_dim + d + j] = j == 0 ? a.x : j == 1 ? a.y : j == 2 ? a.z : a.w;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float tail[HELD];
  for (int k = 0; k < HELD; k++) {
    const int d = int(tid) + k * ATTENTION_THREADS;
    float t = 0.0f;
    if (d < p.value_dim) {
      float a = 0.0f;
      for (int s = 0; s < ATTENTION_SIMDS; s++)
        a += sums[s * p.value_dim + d];
      for (int s = p.splits; s < all; s++)
        t = metal::fma(at[s * p.value_dim + d], weight[s], t);
      code[d] = a * share;
    }
    tail[k] = t * share;
  }
  const bool turned = p.value_basis.order > 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (turned)
    transform_rows<HELD>(code, 1, p.value_dim, p.value_dim, p.value_basis, true, tid,
                         ATTENTION_THREADS);
  for (int k = 0; k < HELD; k++) {
    const int d = int(tid) + k * ATTENTION_THREADS;
    if (d >= p.value_dim)
      continue;
    const long at = row * p.value_dim + d;
    if (p.separate) {
      out_code[at] = code[d];
      out_tail[at] = tail[k];
    } else {
      const float factor =
          turned ? value_diagonal[(p.value_basis.per_head ? kv_head * p.value_dim : 0) + d] : 1.0f;
      out[at] = T(metal::fma(code[d], factor, tail[k]));
    }
  }
}

// The same for many rows of few slices: a simdgroup merges a row, and no memory is shared.
template <typename T, int D>
kernel void attention_merge_rows(
    device const float* part [[buffer(0)]], device const float* part_ml [[buffer(1)]],
    device const float* sinks [[buffer(2)]], device const float* value_diagonal [[buffer(3)]],
    device T* out [[buffer(4)]], device float* out_code [[buffer(5)]],
    device float* out_tail [[buffer(6)]], constant AttentionParams& p [[buffer(7)]],
    uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int HELD = D / 32;
  const long row = long(tgid.x) * ATTENTION_SIMDS + long(sg);
  if (row >= long(p.batch) * p.heads * p.queries)
    return;
  const int head = int(row / p.queries % p.heads), kv_head = head / (p.heads / p.kv_heads);
  const int all = p.splits + p.tail_splits;
  device const float* at = part + row * all * D + long(lane);
  device const float* ml = part_ml + row * all * 2;
  float m = ATTENTION_NEVER, l = 0.0f, code[HELD], tail[HELD];
  for (int s = 0; s < all; s++)
    m = metal::max(m, ml[s * 2]);
  UNROLL
  for (int i = 0; i < HELD; i++)
    code[i] = tail[i] = 0.0f;
  for (int s = 0; s < all; s++) {
    const float w = metal::exp2(ml[s * 2] - m);
    const float of_code = s < p.splits ? w : 0.0f, of_tail = s < p.splits ? 0.0f : w;
    l = metal::fma(ml[s * 2 + 1], w, l);
    UNROLL
    for (int i = 0; i < HELD; i++) {
      const float x = at[s * D + 32 * i];
      code[i] = metal::fma(x, of_code, code[i]);
      tail[i] = metal::fma(x, of_tail, tail[i]);
    }
  }
  const float share = softmax_share(p, sinks, head, m, l);
  const bool turned = p.value_basis.order > 0;
  UNROLL
  for (int i = 0; i < HELD; i++)
    code[i] *= share;
  if (turned)
    hadamard_transform<D, 1>(code, lane, true, p.value_basis.scale);
  UNROLL
  for (int i = 0; i < HELD; i++) {
    const int d = 32 * i + int(lane);
    if (p.separate) {
      out_code[row * D + d] = code[i];
      out_tail[row * D + d] = tail[i] * share;
    } else {
      const float factor =
          turned ? value_diagonal[(p.value_basis.per_head ? kv_head * D : 0) + d] : 1.0f;
      out[row * D + d] = T(metal::fma(code[i], factor, tail[i] * share));
    }
  }
}

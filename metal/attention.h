// Attention over coded tokens and an fp16 tail, without rebuilding K or V: a threadgroup decodes a
// tile of tokens into threadgroup memory once and uses it for every query row it owns. Any code,
// width, GQA ratio and number of queries. Host side: csrc/attention/launch.cpp.
#pragma once

#include "basis.h"
#include "coded_tokens.h"
#include "params.h"
#include "prelude.h"

#define ATTENTION_THREADS 128
#define ATTENTION_SIMDS 4
#define ATTENTION_MAX_WIDTH 576
// Stands for minus infinity and survives fast math.
#define ATTENTION_NEVER -1.0e30f
// The least score of a visible token.
#define ATTENTION_LEAST -0.9e30f
#define LOG2_E 1.44269504088896340736f

template <typename T, int KT, int STRIDE>
METAL_FUNC void load_tile(threadgroup float* tile, device const T* tokens, int width, int first,
                          int end, uint tid) {
  for (int i = int(tid); i < KT * width; i += ATTENTION_THREADS) {
    const int k = i / width, d = i % width;
    tile[k * STRIDE + d] = first + k < end ? float(tokens[long(first + k) * width + d]) : 0.0f;
  }
}

METAL_FUNC int tail_position(constant AttentionParams& p, int slot, int tail_start) {
  return slot < p.sink_tokens ? slot : tail_start + slot - p.sink_tokens;
}

// The score after the mask, whose row begins at value `row`. An additive value of -1e30 or less
// hides a token as false does.
METAL_FUNC float masked(constant AttentionParams& p, device const uchar* mask, long row,
                        int position, float score) {
  if (p.mask_columns > 1 && position >= p.mask_columns)
    return ATTENTION_NEVER;
  const long at = row + position * p.mask_strides[3];
  if (p.mask == MASK_BOOL)
    return mask[at] != 0 ? score : ATTENTION_NEVER;
  const float add = p.mask == MASK_FLOAT  ? ((device const float*)mask)[at]
                    : p.mask == MASK_HALF ? float(((device const half*)mask)[at])
                                          : float(((device const bfloat*)mask)[at]);
  return add > ATTENTION_NEVER ? metal::max(metal::fma(add, LOG2_E, score), ATTENTION_LEAST)
                               : ATTENTION_NEVER;
}

// Positions before the boundary are read from codes (sink tokens excepted), later ones from the
// tail. It depends on the number of tokens a query sees, not on the chunk the query came in.
METAL_FUNC int code_boundary(constant AttentionParams& p, int seen, int coded, int tail_start) {
  const int beyond = seen - p.sink_tokens - p.window;
  const int limit = beyond > 0 ? beyond / p.block * p.block : 0;
  return p.sink_tokens + metal::min(coded, metal::max(tail_start - p.sink_tokens, limit));
}

// Number i of the layout of row b: tokens, coded tokens, position of the first recent tail token.
METAL_FUNC int layout_count(constant AttentionParams& p, device const int* layout, int b, int i) {
  return p.uniform ? p.counts[i] : layout[b * 3 + i];
}

// What a query row sees of the tokens of a slice, body tokens or tail slots: [0, sinks) and
// [first, last).
struct RowView {
  int sinks, first, last;
};

METAL_FUNC RowView row_view(constant AttentionParams& p, device const int* layout, int b, int token,
                            bool body) {
  const int length = layout_count(p, layout, b, 0);
  const int coded = metal::clamp(layout_count(p, layout, b, 1), 0, p.body);
  const int tail_start = metal::max(layout_count(p, layout, b, 2), p.sink_tokens);
  // under an array mask a query may see any token, but reads as codes what it reads by itself
  const int own = p.causal || p.mask ? length - p.queries + token + 1 : length;
  const int seen = p.causal ? own : length;
  const int boundary = code_boundary(p, own, coded, tail_start);
  RowView v;
  v.sinks = body ? 0 : metal::min(metal::min(p.sink_tokens, seen), p.tail);
  v.first = body ? 0 : boundary - tail_start + p.sink_tokens;
  v.last = body ? metal::min(boundary, seen) - p.sink_tokens
                : metal::min(seen - tail_start + p.sink_tokens, p.tail);
  return v;
}

// Place of row r of a kv head among the query rows [batch, heads, queries].
METAL_FUNC long query_row(constant AttentionParams& p, int b, int h, int r) {
  const long head = h * (p.heads / p.kv_heads) + r / p.queries;
  return (b * long(p.heads) + head) * p.queries + r % p.queries;
}

// Grid: (tiles of R query rows, batch * kv heads, slices). Row r of a kv head is query head r / L
// of its group at query token r % L. Slices are even shares of the body, then of the tail.
template <typename T, int DMAX, int R, int KT>
kernel void attention_tile(
    device const T* q [[buffer(0)]], device const float* q_code [[buffer(1)]],
    device const int* layout [[buffer(2)]], device const T* k_tail [[buffer(3)]],
    device const T* v_tail [[buffer(4)]], device const uchar* k_codes [[buffer(5)]],
    device const float* k_table [[buffer(6)]], device const uchar* k_scales [[buffer(7)]],
    device const uchar* k_centres [[buffer(8)]], device const uchar* k_centre_scales [[buffer(9)]],
    device const uchar* pair_codes [[buffer(10)]], device const float* pair_table [[buffer(11)]],
    device const uchar* pair_scales [[buffer(12)]], device const uchar* v_codes [[buffer(13)]],
    device const float* v_table [[buffer(14)]], device const uchar* v_scales [[buffer(15)]],
    device const uchar* v_centres [[buffer(16)]],
    device const uchar* v_centre_scales [[buffer(17)]], device const uchar* mask [[buffer(18)]],
    device const float* key_diagonal [[buffer(19)]],
    device float* part [[buffer(20)]],     // [rows, slices, Dv]: sums of weighted values
    device float* part_ml [[buffer(21)]],  // [rows, slices, 2]: maximum and sum of weights
    constant AttentionParams& p [[buffer(22)]], uint3 tgid [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int STRIDE = DMAX + 1;  // spreads the rows of a tile over the memory banks
  constexpr int COLS = (DMAX + ATTENTION_THREADS - 1) / ATTENTION_THREADS;
  threadgroup_array(float, qs, R* DMAX);
  threadgroup_array(float, tile, KT* STRIDE);
  threadgroup_array(float, weight, R* KT);
  threadgroup_array(float, rescale, R);
  threadgroup_array(float, row_m, R);
  threadgroup_array(float, row_l, R);
  threadgroup_array(long, row_mask, R);
  threadgroup_array(int, row_sinks, R);
  threadgroup_array(int, row_first, R);
  threadgroup_array(int, row_last, R);

  const int group = p.heads / p.kv_heads;
  const int rows = group * p.queries;
  const int row0 = int(tgid.x) * R;
  const long bh = tgid.y;
  const int b = int(bh) / p.kv_heads, h = int(bh) % p.kv_heads;
  const bool body = int(tgid.z) < p.splits;

  for (int r = int(tid); r < R; r += ATTENTION_THREADS) {
    const int token = (row0 + r) % p.queries;
    const int head = h * group + (row0 + r) / p.queries;
    RowView v = row_view(p, layout, b, token, body);
    const bool there = row0 + r < rows;
    row_sinks[r] = there ? v.sinks : 0;
    row_first[r] = v.first;
    row_last[r] = there ? v.last : 0;
    row_mask[r] = b * p.mask_strides[0] + head * p.mask_strides[1] + token * p.mask_strides[2];
    row_m[r] = ATTENTION_NEVER;
    row_l[r] = 0.0f;
  }
  const int own = p.key.entries * p.key.dims, channels = own + p.pair.entries * p.pair.dims;
  const int key_width = body ? channels : p.key_dim;
  const bool turned = body && p.key_basis.order > 0;
  for (int i = int(tid); i < R * key_width; i += ATTENTION_THREADS) {
    const int r = i / key_width, d = i % key_width;
    float v = 0.0f;
    if (row0 + r < rows) {
      const long at = query_row(p, b, h, row0 + r);
      v = body && !turned ? q_code[at * key_width + d] : float(q[at * key_width + d]);
      if (turned)
        v *= key_diagonal[(p.key_basis.per_head ? h * key_width : 0) + d];
    }
    qs[r * DMAX + d] = v * p.scale;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (turned)
    transform_rows<R * DMAX / ATTENTION_THREADS>(qs, R, key_width, DMAX, p.key_basis, false, tid,
                                                 ATTENTION_THREADS);

  // this slice's share of what any row sees
  int end_of_all = 0;
  for (int r = 0; r < R; r++)
    end_of_all = metal::max(end_of_all, metal::max(row_sinks[r], row_last[r]));
  const int slice = body ? int(tgid.z) : int(tgid.z) - p.splits;
  const int slices = body ? p.splits : p.tail_splits;
  const int share = (end_of_all + slices - 1) / slices;
  const int end = metal::min((slice + 1) * share, end_of_all);

  const long blocks = (p.body + p.block - 1) / p.block;
  const CodedTokens kc = coded_tokens(p.key, k_codes, k_table, k_scales, k_centres, k_centre_scales,
                                      bh, h, p.body, blocks, own);
  const CodedTokens pc = coded_tokens(p.pair, pair_codes, pair_table, pair_scales, pair_scales,
                                      pair_scales, bh, h, p.body, 0, 0);
  const CodedTokens vc = coded_tokens(p.value, v_codes, v_table, v_scales, v_centres,
                                      v_centre_scales, bh, h, p.body, blocks, p.value_dim);
  device const T* kt = k_tail + bh * p.tail * p.key_dim;
  device const T* vt = v_tail + bh * p.tail * p.value_dim;
  const int tail_start = metal::max(layout_count(p, layout, b, 2), p.sink_tokens);

  float acc[R * COLS];
  for (int i = 0; i < R * COLS; i++)
    acc[i] = 0.0f;

  for (int first = slice * share; first < end; first += KT) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (body) {
      decode_tile<KT, STRIDE, ATTENTION_THREADS>(tile, p.key, kc, p.block, first, end, tid);
      decode_tile<KT, STRIDE, ATTENTION_THREADS>(tile + own, p.pair, pc, p.block, first, end, tid);
    } else {
      load_tile<T, KT, STRIDE>(tile, kt, p.key_dim, first, end, tid);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(tid); i < R * KT; i += ATTENTION_THREADS) {
      const int r = i / KT, k = i % KT, slot = first + k;
      const bool visible =
          slot < end && (slot < row_sinks[r] || (slot >= row_first[r] && slot < row_last[r]));
      float s = ATTENTION_NEVER;
      if (visible) {
        // four sums round less than one, and do not wait for each other
        float4 sum = float4(0.0f);
        threadgroup const float *a = qs + r * DMAX, *c = tile + k * STRIDE;
        int d = 0;
        for (; d + 4 <= key_width; d += 4) {
          sum.x = metal::fma(a[d], c[d], sum.x);
          sum.y = metal::fma(a[d + 1], c[d + 1], sum.y);
          sum.z = metal::fma(a[d + 2], c[d + 2], sum.z);
          sum.w = metal::fma(a[d + 3], c[d + 3], sum.w);
        }
        for (; d < key_width; d++)
          sum.x = metal::fma(a[d], c[d], sum.x);
        s = (sum.x + sum.y) + (sum.z + sum.w);
        if (p.mask) {
          const int position = body ? slot + p.sink_tokens : tail_position(p, slot, tail_start);
          s = masked(p, mask, row_mask[r], position, s);
        }
      }
      weight[i] = s;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = int(sg); r < R; r += ATTENTION_SIMDS) {
      const float s =
          int(lane) < KT ? weight[r * KT + (int(lane) < KT ? int(lane) : 0)] : ATTENTION_NEVER;
      const float m = row_m[r], m_new = metal::max(m, simd_max(s));
      const float w = s > ATTENTION_NEVER ? metal::exp2(s - m_new) : 0.0f;
      const float sum = simd_sum(w);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if (int(lane) < KT)
        weight[r * KT + int(lane)] = w;
      if (lane == 0) {
        const float a = metal::exp2(m - m_new);
        rescale[r] = a;
        row_l[r] = row_l[r] * a + sum;
        row_m[r] = m_new;
      }
    }
    if (body) {
      decode_tile<KT, STRIDE, ATTENTION_THREADS>(tile, p.value, vc, p.block, first, end, tid);
    } else {
      load_tile<T, KT, STRIDE>(tile, vt, p.value_dim, first, end, tid);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < COLS; c++) {
      const int d = int(tid) + c * ATTENTION_THREADS;
      if (d < p.value_dim) {
        UNROLL
        for (int r = 0; r < R; r++) {
          float a = acc[r * COLS + c] * rescale[r];
          for (int k = 0; k < KT; k++)
            a = metal::fma(weight[r * KT + k], tile[k * STRIDE + d], a);
          acc[r * COLS + c] = a;
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int all = p.splits + p.tail_splits;
  UNROLL
  for (int r = 0; r < R; r++) {
    if (row0 + r >= rows)
      continue;
    const long at = query_row(p, b, h, row0 + r) * all + tgid.z;
    UNROLL
    for (int c = 0; c < COLS; c++) {
      const int d = int(tid) + c * ATTENTION_THREADS;
      if (d < p.value_dim)
        part[at * p.value_dim + d] = acc[r * COLS + c];
    }
    if (tid == 0) {
      part_ml[at * 2] = row_m[r];
      part_ml[at * 2 + 1] = row_l[r];
    }
  }
}

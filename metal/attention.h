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

// Grid: (tiles of R query rows, batch * kv heads, splits). Row r of a kv head is query head r / L
// of its group at query token r % L. A split takes an even share of the slots [body | tail].
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
    device const float* sinks [[buffer(19)]],         // [heads]
    device const float* key_diagonal [[buffer(20)]],  // of the bases
    device const float* value_diagonal [[buffer(21)]],
    device T* out [[buffer(22)]],       // where nothing is merged: the result
    device float* part [[buffer(23)]],  // [rows, splits, Dv]: all, or with p.separate from codes
    device float* part_tail [[buffer(24)]],  // [rows, splits, Dv] with p.separate: from the tail
    device float* part_ml [[buffer(25)]],    // [rows, splits, 2]: maximum and sum of weights
    constant AttentionParams& p [[buffer(26)]], uint3 tgid [[threadgroup_position_in_grid]],
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
  threadgroup_array(int, row_seen, R);
  threadgroup_array(int, row_boundary, R);

  const int group = p.heads / p.kv_heads;
  const int rows = group * p.queries;
  const int row0 = int(tgid.x) * R;
  const long bh = tgid.y;
  const int b = int(bh) / p.kv_heads, h = int(bh) % p.kv_heads;
  const int length = layout[b * 3], coded = metal::clamp(layout[b * 3 + 1], 0, p.body);
  const int tail_start = metal::max(layout[b * 3 + 2], p.sink_tokens);

  for (int r = int(tid); r < R; r += ATTENTION_THREADS) {
    const int token = (row0 + r) % p.queries;
    // under an array mask a query may see any token, but reads as codes what it reads by itself
    const int own = p.causal || p.mask ? length - p.queries + token + 1 : length;
    const int head = h * group + (row0 + r) / p.queries;
    row_seen[r] = row0 + r < rows ? (p.causal ? own : length) : 0;
    row_boundary[r] = code_boundary(p, own, coded, tail_start);
    row_mask[r] = b * p.mask_strides[0] + head * p.mask_strides[1] + token * p.mask_strides[2];
    row_m[r] = ATTENTION_NEVER;
    row_l[r] = 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int body_end = 0, seen_end = 0;
  for (int r = 0; r < R; r++) {
    body_end = metal::max(body_end, metal::min(row_boundary[r], row_seen[r]) - p.sink_tokens);
    seen_end = metal::max(seen_end, row_seen[r]);
  }
  int tail_end = metal::min(p.sink_tokens, seen_end) + metal::max(seen_end - tail_start, 0);
  tail_end = metal::min(tail_end, p.tail);

  // this split's share of the slots
  const int share = (p.body + p.tail + p.splits - 1) / p.splits;
  const int slot0 = int(tgid.z) * share, slot1 = slot0 + share;
  const int begins[2] = {metal::min(slot0, p.body), metal::max(slot0 - p.body, 0)};
  const int ends[2] = {metal::min(slot1, body_end), metal::min(slot1 - p.body, tail_end)};

  const long blocks = (p.body + p.block - 1) / p.block;
  const int own = p.key.entries * p.key.dims, channels = own + p.pair.entries * p.pair.dims;
  const CodedTokens kc = coded_tokens(p.key, k_codes, k_table, k_scales, k_centres, k_centre_scales,
                                      bh, h, p.body, blocks, own);
  const CodedTokens pc = coded_tokens(p.pair, pair_codes, pair_table, pair_scales, pair_scales,
                                      pair_scales, bh, h, p.body, 0, 0);
  const CodedTokens vc = coded_tokens(p.value, v_codes, v_table, v_scales, v_centres,
                                      v_centre_scales, bh, h, p.body, blocks, p.value_dim);
  device const T* kt = k_tail + bh * p.tail * p.key_dim;
  device const T* vt = v_tail + bh * p.tail * p.value_dim;

  float acc[R * COLS], acc_body[R * COLS];
  for (int i = 0; i < R * COLS; i++) {
    acc[i] = 0.0f;
    acc_body[i] = 0.0f;
  }

  for (int part_index = 0; part_index < 2; part_index++) {
    const bool body = part_index == 0;
    const int key_width = body ? channels : p.key_dim;
    const int end = ends[part_index];
    if (begins[part_index] < end) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool turned = body && p.key_basis.order > 0;
      for (int i = int(tid); i < R * key_width; i += ATTENTION_THREADS) {
        const int r = i / key_width, d = i % key_width;
        float v = 0.0f;
        if (row0 + r < rows) {
          const long head = h * group + (row0 + r) / p.queries;
          const long at = ((b * long(p.heads) + head) * p.queries + (row0 + r) % p.queries);
          v = body && !turned ? q_code[at * key_width + d] : float(q[at * key_width + d]);
          if (turned)
            v *= key_diagonal[(p.key_basis.per_head ? h * key_width : 0) + d];
        }
        qs[r * DMAX + d] = v * p.scale;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (turned)
        transform_rows<R * DMAX / ATTENTION_THREADS>(qs, R, key_width, DMAX, p.key_basis, false,
                                                     tid, ATTENTION_THREADS);
    }
    for (int first = begins[part_index]; first < end; first += KT) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (body) {
        decode_tile<KT, STRIDE, ATTENTION_THREADS>(tile, p.key, kc, p.block, first, end, tid);
        decode_tile<KT, STRIDE, ATTENTION_THREADS>(tile + own, p.pair, pc, p.block, first, end,
                                                   tid);
      } else {
        load_tile<T, KT, STRIDE>(tile, kt, p.key_dim, first, end, tid);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = int(tid); i < R * KT; i += ATTENTION_THREADS) {
        const int r = i / KT, k = i % KT, slot = first + k;
        const int position = body ? slot + p.sink_tokens : tail_position(p, slot, tail_start);
        bool visible = slot < end && position < row_seen[r];
        if (body) {
          visible = visible && position < row_boundary[r];
        } else {
          visible = visible && (slot < p.sink_tokens || position >= row_boundary[r]);
        }
        float s = ATTENTION_NEVER;
        if (visible) {
          s = 0.0f;
          for (int d = 0; d < key_width; d++) {
            s = metal::fma(qs[r * DMAX + d], tile[k * STRIDE + d], s);
          }
          if (p.mask)
            s = masked(p, mask, row_mask[r], position, s);
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
          for (int r = 0; r < R; r++) {
            float a = acc[r * COLS + c] * rescale[r];
            acc_body[r * COLS + c] *= rescale[r];
            for (int k = 0; k < KT; k++) {
              a = metal::fma(weight[r * KT + k], tile[k * STRIDE + d], a);
            }
            acc[r * COLS + c] = a;
          }
        }
      }
    }
    if (body && p.separate) {
      for (int i = 0; i < R * COLS; i++) {
        acc_body[i] = acc[i];
        acc[i] = 0.0f;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const bool merged = p.splits > 1 || p.value_basis.order > 0;
  for (int r = 0; r < R && row0 + r < rows; r++) {
    const long head = h * group + (row0 + r) / p.queries;
    const long row = (b * long(p.heads) + head) * p.queries + (row0 + r) % p.queries;
    const float inv = merged ? 1.0f : softmax_share(p, sinks, int(head), row_m[r], row_l[r]);
    const long at = (row * p.splits + tgid.z) * p.value_dim;
    for (int c = 0; c < COLS; c++) {
      const int d = int(tid) + c * ATTENTION_THREADS;
      if (d < p.value_dim) {
        const float v = acc[r * COLS + c] * inv;
        if (p.separate) {
          part[at + d] = acc_body[r * COLS + c] * inv;
          part_tail[at + d] = v;
        } else if (merged) {
          part[at + d] = v;
        } else {
          out[at + d] = T(v);
        }
      }
    }
    if (merged && tid == 0) {
      part_ml[(row * p.splits + tgid.z) * 2] = row_m[r];
      part_ml[(row * p.splits + tgid.z) * 2 + 1] = row_l[r];
    }
  }
}

// Second pass: one threadgroup merges the splits of one query row, and turns what the codes gave
// back into the basis of the values.
template <typename T>
kernel void attention_merge(
    device const float* part [[buffer(0)]], device const float* part_tail [[buffer(1)]],
    device const float* part_ml [[buffer(2)]], device const float* sinks [[buffer(3)]],
    device const float* value_diagonal [[buffer(4)]], device T* out [[buffer(5)]],
    device float* out_code [[buffer(6)]], device float* out_tail [[buffer(7)]],
    constant AttentionParams& p [[buffer(8)]], uint3 tgid [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int HELD = (ATTENTION_MAX_WIDTH + ATTENTION_THREADS - 1) / ATTENTION_THREADS;
  threadgroup_array(float, code, ATTENTION_MAX_WIDTH);
  const long row = tgid.x;
  const int head = int(row / p.queries % p.heads), kv_head = head / (p.heads / p.kv_heads);
  device const float* ml = part_ml + row * p.splits * 2;
  float m = ATTENTION_NEVER;
  for (int s = 0; s < p.splits; s++)
    m = metal::max(m, ml[s * 2]);
  float l = 0.0f;
  for (int s = 0; s < p.splits; s++)
    l += ml[s * 2 + 1] * metal::exp2(ml[s * 2] - m);
  const float share = softmax_share(p, sinks, head, m, l);
  float tail[HELD];
  for (int k = 0; k < HELD; k++) {
    const int d = int(tid) + k * ATTENTION_THREADS;
    float a = 0.0f, t = 0.0f;
    for (int s = 0; d < p.value_dim && s < p.splits; s++) {
      const float w = metal::exp2(ml[s * 2] - m) * share;
      const long at = (row * p.splits + s) * p.value_dim + d;
      a = metal::fma(part[at], w, a);
      if (p.separate)
        t = metal::fma(part_tail[at], w, t);
    }
    if (d < p.value_dim)
      code[d] = a;
    tail[k] = t;
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
    if (turned) {
      const int of = (p.value_basis.per_head ? kv_head * p.value_dim : 0) + d;
      out[at] = T(metal::fma(code[d], value_diagonal[of], tail[k]));
    } else if (p.separate) {
      out_code[at] = code[d];
      out_tail[at] = tail[k];
    } else {
      out[at] = T(code[d]);
    }
  }
}

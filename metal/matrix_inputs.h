// What the kernels that multiply matrices of a simdgroup read: query rows, scales, both sides.
#pragma once

#include "hadamard.h"
#include "matrix_step.h"

// Query row `from` / D as the products take it, for the codes relative to its largest value;
// channel d goes to `rows` + to.at(d), and what 16 bits lose of it `rest` values on, if that is not
// 0. Returns what scores of it are to be multiplied by, besides the softmax scale.
template <typename T, int D, typename To>
METAL_FUNC float load_query_row(threadgroup ushort* rows, To to, int rest, device const T* q,
                                device const float* q_code, device const float* diagonal,
                                constant BasisParams& basis, long from, bool body, uint lane) {
  if (!body) {
    for (int d = int(lane); d < D; d += 32)
      ((threadgroup T*)rows)[to.at(d)] = q[from + d];
    return 1.0f;
  }
  const bool turned = basis.order > 0;
  float v[D / 32], most = 0.0f;
  UNROLL
  for (int i = 0; i < D / 32; i++) {
    const int d = 32 * i + int(lane);
    v[i] = turned ? float(q[from + d]) * diagonal[d] : q_code[from + d];
  }
  if (turned)
    hadamard_transform<D, 1>(v, lane, false, basis.scale);
  UNROLL
  for (int i = 0; i < D / 32; i++)
    most = metal::max(most, metal::abs(v[i]));
  most = metal::simd_max(most);  // 16 bits hold a row relative to its largest value
  const float by = most > 0.0f ? 1.0f / most : 0.0f;
  UNROLL
  for (int i = 0; i < D / 32; i++) {
    threadgroup half* at = (threadgroup half*)rows + to.at(32 * i + int(lane));
    at[0] = half(v[i] * by);
    if (rest != 0)
      at[rest] = half(v[i] * by - float(at[0]));
  }
  return most;
}

// Of the codes of row `bh` of batch and kv heads; the tail has none.
template <int D>
METAL_FUNC MatrixScales matrix_scales(constant AttentionParams& p, bool body, long bh,
                                      device const uchar* keys, device const uchar* values,
                                      device const uchar* centres,
                                      device const uchar* centre_scales) {
  const long blocks = (p.body + p.block - 1) / p.block;
  MatrixScales s;
  s.scaled = body && p.key.scaled != 0;
  s.weighted = body && p.value.scaled != 0;
  s.centred = body && p.key.centred != 0;
  s.keys = (device const bfloat*)keys + bh * p.body;
  s.values = (device const bfloat*)values + bh * p.body;
  s.centres = (device const char*)centres + bh * blocks * D;
  s.centre_scales = (device const bfloat*)centre_scales + bh * blocks;
  s.tokens = p.body;
  s.block = p.block;
  return s;
}

template <typename T>
struct MatrixSides {
  MatrixSide<T> keys, values;
};

template <int CODE>
METAL_FUNC MatrixSides<half> coded_sides(constant AttentionParams& p, long bh,
                                         device const uchar* keys, device const uchar* values,
                                         threadgroup const uchar* tables, uint lane) {
  MatrixSides<half> s;
  s.keys.codes = keys + bh * p.body * p.key.bytes;
  s.keys.bits = p.key.stride;
  s.keys.table.rows = tables;
  s.keys.table.at = lane % CODE_COPIES(CODE) * CODE_ENTRY(CODE);
  s.keys.vectors = (device const half*)keys;
  s.values.codes = values + bh * p.body * p.value.bytes;
  s.values.bits = p.value.stride;
  s.values.table.rows = tables;
  s.values.table.at = s.keys.table.at + TABLE_ROW_BYTES / 2;
  s.values.vectors = s.keys.vectors;
  return s;
}

template <typename T, int D>
METAL_FUNC MatrixSides<T> tail_sides(constant AttentionParams& p, long bh, device const T* keys,
                                     device const T* values, threadgroup const uchar* tables) {
  MatrixSides<T> s;
  s.keys.codes = (device const uchar*)keys;
  s.keys.bits = 0;
  s.keys.table.rows = tables;
  s.keys.table.at = 0;
  s.keys.vectors = keys + bh * p.tail * D;
  s.values = s.keys;
  s.values.vectors = values + bh * p.tail * D;
  return s;
}

// Signs of a sketch of each vector, and inner products estimated from them. Host side:
// csrc/qjl/launch.cpp.
#pragma once

#include "params.h"
#include "prelude.h"

#define QJL_THREADS 128
// Vectors and sketch rows of a threadgroup; a thread has 8 rows (one byte) of 2 vectors.
#define QJL_VECTORS 32
#define QJL_CHANNELS 64
#define QJL_PER_THREAD 2
// Values of a vector staged at a time, and the row strides that spread them over the memory banks.
#define QJL_DIMS 32
#define QJL_VECTOR_STRIDE (QJL_DIMS + 1)
#define QJL_SKETCH_STRIDE (QJL_CHANNELS + 1)
// Query rows and sketch rows of one qjl_scores tile.
#define QJL_ROWS 8
#define QJL_STAGE 256

// products[v * 8 + j]: vector row0 + tid / 8 + 16 v times sketch row channel0 + tid % 8 * 8 + j, an
// fma chain over the dimensions. squares[v]: of the values at dimensions tid % 8, + 8, + 16, ...
template <typename T>
METAL_FUNC void qjl_products(threadgroup float* xs, threadgroup float* ss, device const T* x,
                             device const float* sketch, constant QjlParams& p, long row0,
                             int channel0, uint tid, thread float* products,
                             thread float* squares) {
  const int octet = int(tid) % 8, first = int(tid) / 8;
  for (int i = 0; i < QJL_PER_THREAD * 8; i++)
    products[i] = 0.0f;
  for (int v = 0; v < QJL_PER_THREAD; v++)
    squares[v] = 0.0f;
  for (int d0 = 0; d0 < p.dims; d0 += QJL_DIMS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(tid); i < QJL_VECTORS * QJL_DIMS; i += QJL_THREADS) {
      const int v = i / QJL_DIMS, d = i % QJL_DIMS;
      const bool exists = row0 + v < p.rows && d0 + d < p.dims;
      xs[v * QJL_VECTOR_STRIDE + d] = exists ? float(x[(row0 + v) * p.dims + d0 + d]) : 0.0f;
    }
    for (int i = int(tid); i < QJL_CHANNELS * QJL_DIMS; i += QJL_THREADS) {
      const int c = i / QJL_DIMS, d = i % QJL_DIMS;
      const bool exists = channel0 + c < p.channels && d0 + d < p.dims;
      ss[d * QJL_SKETCH_STRIDE + c] = exists ? sketch[long(channel0 + c) * p.dims + d0 + d] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int d = 0; d < QJL_DIMS; d++) {
      for (int v = 0; v < QJL_PER_THREAD; v++) {
        const float xd = xs[(first + v * (QJL_THREADS / 8)) * QJL_VECTOR_STRIDE + d];
        for (int j = 0; j < 8; j++) {
          products[v * 8 + j] =
              metal::fma(ss[d * QJL_SKETCH_STRIDE + octet * 8 + j], xd, products[v * 8 + j]);
        }
      }
    }
    for (int d = octet; d < QJL_DIMS; d += 8) {
      for (int v = 0; v < QJL_PER_THREAD; v++) {
        const float xd = xs[(first + v * (QJL_THREADS / 8)) * QJL_VECTOR_STRIDE + d];
        squares[v] = metal::fma(xd, xd, squares[v]);
      }
    }
  }
}

// Grid: (tiles of vectors, tiles of sketch rows). The first tile of sketch rows writes the norms.
template <typename T>
kernel void qjl_encode(device const T* x [[buffer(0)]], device const float* sketch [[buffer(1)]],
                       device uchar* signs [[buffer(2)]], device bfloat* norms [[buffer(3)]],
                       constant QjlParams& p [[buffer(4)]],
                       uint3 tgid [[threadgroup_position_in_grid]],
                       uint tid [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup_array(float, xs, QJL_VECTORS* QJL_VECTOR_STRIDE);
  threadgroup_array(float, ss, QJL_DIMS* QJL_SKETCH_STRIDE);
  float products[QJL_PER_THREAD * 8], squares[QJL_PER_THREAD];
  const long row0 = long(tgid.x) * QJL_VECTORS;
  const int channel0 = int(tgid.y) * QJL_CHANNELS;
  qjl_products<T>(xs, ss, x, sketch, p, row0, channel0, tid, products, squares);

  const int byte = channel0 / 8 + int(tid) % 8;
  for (int v = 0; v < QJL_PER_THREAD; v++) {
    const long row = row0 + int(tid) / 8 + v * (QJL_THREADS / 8);
    uint bits = 0;
    for (int j = 0; j < 8; j++)
      bits |= (products[v * 8 + j] >= 0.0f ? 1u : 0u) << j;  // false for NaN
    if (row < p.rows && byte < p.channels / 8)
      signs[row * (p.channels / 8) + byte] = uchar(bits);
    // the 8 threads of a vector hold its sum of squares
    float sum = squares[v];
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 2);
    sum += simd_shuffle_xor(sum, 4);
    if (row < p.rows && byte == 0)
      norms[row] = bfloat(metal::sqrt(sum));
  }
}

// x times the sketch: [rows, channels]. Grid as for qjl_encode.
template <typename T>
kernel void qjl_project(device const T* x [[buffer(0)]], device const float* sketch [[buffer(1)]],
                        device float* out [[buffer(2)]], constant QjlParams& p [[buffer(3)]],
                        uint3 tgid [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup_array(float, xs, QJL_VECTORS* QJL_VECTOR_STRIDE);
  threadgroup_array(float, ss, QJL_DIMS* QJL_SKETCH_STRIDE);
  float products[QJL_PER_THREAD * 8], squares[QJL_PER_THREAD];
  const long row0 = long(tgid.x) * QJL_VECTORS;
  const int channel0 = int(tgid.y) * QJL_CHANNELS;
  qjl_products<T>(xs, ss, x, sketch, p, row0, channel0, tid, products, squares);

  const int channel = channel0 + int(tid) % 8 * 8;
  for (int v = 0; v < QJL_PER_THREAD; v++) {
    const long row = row0 + int(tid) / 8 + v * (QJL_THREADS / 8);
    if (row < p.rows && channel < p.channels) {
      for (int j = 0; j < 8; j++)
        out[row * p.channels + channel + j] = products[v * 8 + j];
    }
  }
}

// Grid: (tiles of tokens, tiles of query rows, key heads). A thread has one token and QJL_ROWS
// query rows; the sums run over the sketch rows in order.
template <typename T>
kernel void qjl_scores(device const float* queries [[buffer(0)]],
                       device const uchar* signs [[buffer(1)]], device const T* norms [[buffer(2)]],
                       device float* out [[buffer(3)]], constant QjlScoresParams& p [[buffer(4)]],
                       uint3 tgid [[threadgroup_position_in_grid]],
                       uint tid [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup_array(float, qs, QJL_STAGE* QJL_ROWS);
  const long head = tgid.z;
  const int token = int(tgid.x) * QJL_THREADS + int(tid), row0 = int(tgid.y) * QJL_ROWS;
  const long at = head * p.tokens + metal::min(token, p.tokens - 1);
  device const uchar* bytes = signs + at * (p.channels / 8);
  device const float* q = queries + (head * p.rows + row0) * p.channels;

  float acc[QJL_ROWS];
  for (int r = 0; r < QJL_ROWS; r++)
    acc[r] = 0.0f;
  for (int c0 = 0; c0 < p.channels; c0 += QJL_STAGE) {
    const int n = metal::min(QJL_STAGE, p.channels - c0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(tid); i < QJL_ROWS * n; i += QJL_THREADS) {
      const int r = i / n, c = i % n;
      qs[c * QJL_ROWS + r] = row0 + r < p.rows ? q[long(r) * p.channels + c0 + c] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < n; c += 8) {
      const uint bits = bytes[(c0 + c) / 8];
      for (int j = 0; j < 8; j++) {
        const float sign = (bits >> j) & 1u ? 1.0f : -1.0f;
        for (int r = 0; r < QJL_ROWS; r++)
          acc[r] = metal::fma(qs[(c + j) * QJL_ROWS + r], sign, acc[r]);
      }
    }
  }
  const float scale = p.unit * float(norms[at]);
  for (int r = 0; r < QJL_ROWS; r++) {
    if (token < p.tokens && row0 + r < p.rows)
      out[(head * p.rows + row0 + r) * p.tokens + token] = acc[r] * scale;
  }
}

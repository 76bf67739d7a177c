// Bit streams of fixed-width entries, and scalar quantisation into them. Host side:
// csrc/scalar/launch.cpp.
#pragma once

#include "params.h"
#include "prelude.h"

#define SCALAR_THREADS 256

// A thread takes eight entries of a row: they are `bits` whole bytes, so no two threads share one.
struct Octet {
  long entry;  // where they begin
  long byte;
  int entries;  // fewer at the end of a row, none past the last row
};

METAL_FUNC Octet octet_of(constant ScalarParams& p, uint group, uint tid) {
  const long per_row = (p.n + 7) / 8;
  const long i = long(group) * SCALAR_THREADS + tid;
  const long row = i / per_row, at = i % per_row;
  Octet o;
  o.entry = row * p.n + at * 8;
  o.byte = row * p.bytes + at * p.bits;
  o.entries = row < p.rows ? int(metal::min(8l, p.n - at * 8)) : 0;
  return o;
}

// Writes a stream from a byte on, least significant bit first.
struct BitWriter {
  device uchar* out;
  uint held;
  int filled;  // bits of `held`
};

METAL_FUNC void put_bits(thread BitWriter& w, uint value, int bits) {
  w.held |= value << w.filled;
  w.filled += bits;
  while (w.filled >= 8) {
    *w.out++ = uchar(w.held & 0xff);
    w.held >>= 8;
    w.filled -= 8;
  }
}

METAL_FUNC void put_rest(thread BitWriter& w) {
  if (w.filled > 0)
    *w.out = uchar(w.held);
}

struct BitReader {
  device const uchar* in;
  uint held;
  int filled;
};

METAL_FUNC uint get_bits(thread BitReader& r, int bits) {
  while (r.filled < bits) {
    r.held |= uint(*r.in++) << r.filled;
    r.filled += 8;
  }
  const uint value = r.held & ((1u << bits) - 1);
  r.held >>= bits;
  r.filled -= bits;
  return value;
}

template <typename C>
kernel void pack_bits(device const C* indices [[buffer(0)]], device uchar* packed [[buffer(1)]],
                      constant ScalarParams& p [[buffer(2)]],
                      uint3 tgid [[threadgroup_position_in_grid]],
                      uint tid [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint sg [[simdgroup_index_in_threadgroup]]) {
  const Octet o = octet_of(p, tgid.x, tid);
  BitWriter w = {packed + o.byte, 0, 0};
  for (int j = 0; j < o.entries; j++)
    put_bits(w, uint(indices[o.entry + j]) & ((1u << p.bits) - 1), p.bits);
  put_rest(w);
}

template <typename C>
kernel void unpack_bits(device const uchar* packed [[buffer(0)]], device C* indices [[buffer(1)]],
                        constant ScalarParams& p [[buffer(2)]],
                        uint3 tgid [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint sg [[simdgroup_index_in_threadgroup]]) {
  const Octet o = octet_of(p, tgid.x, tid);
  BitReader r = {packed + o.byte, 0, 0};
  for (int j = 0; j < o.entries; j++)
    indices[o.entry + j] = C(get_bits(r, p.bits));
}

// The index is the number of bounds, midpoints of neighbouring centroids, below x: found by
// bisection, 0 for NaN.
template <typename T>
kernel void quantize_scalar(
    device const T* x [[buffer(0)]], device const float* centroids [[buffer(1)]],
    device uchar* packed [[buffer(2)]], constant ScalarParams& p [[buffer(3)]],
    uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup_array(float, bounds, 256);
  const int levels = 1 << p.bits;
  if (int(tid) + 1 < levels)
    bounds[tid] = 0.5f * (centroids[tid] + centroids[tid + 1]);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const Octet o = octet_of(p, tgid.x, tid);
  BitWriter w = {packed + o.byte, 0, 0};
  for (int j = 0; j < o.entries; j++) {
    const float v = float(x[o.entry + j]);
    uint index = 0;
    for (int step = levels / 2; step > 0; step /= 2)
      index += bounds[index + step - 1] < v ? step : 0;
    put_bits(w, index, p.bits);
  }
  put_rest(w);
}

template <typename T>
kernel void dequantize_scalar(device const uchar* packed [[buffer(0)]],
                              device const T* centroids [[buffer(1)]], device T* out [[buffer(2)]],
                              constant ScalarParams& p [[buffer(3)]],
                              uint3 tgid [[threadgroup_position_in_grid]],
                              uint tid [[thread_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint sg [[simdgroup_index_in_threadgroup]]) {
  const Octet o = octet_of(p, tgid.x, tid);
  BitReader r = {packed + o.byte, 0, 0};
  for (int j = 0; j < o.entries; j++)
    out[o.entry + j] = centroids[get_bits(r, p.bits)];
}

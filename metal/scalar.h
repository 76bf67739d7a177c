// Bit streams of fixed-width entries, and scalar quantisation into them. Host side:
// csrc/scalar/launch.cpp.
#pragma once

#include "params.h"
#include "prelude.h"

#define SCALAR_THREADS 256
#define SCALAR_CHUNKS 4  // of 16 entries, per thread of pack_bits and unpack_bits

// A thread takes eight entries of a row: they are `bits` whole bytes, so no two threads share one.
struct Octet {
  long entry;  // where they begin
  long byte;
  int entries;  // fewer at the end of a row, none past the last row
};

METAL_FUNC Octet octet_of(constant ScalarParams& p, long i) {
  const long per_row = (p.n + 7) / 8;
  const long row = p.rows > 1 ? i / per_row : i >= per_row;
  const long at = i - row * per_row;
  Octet o;
  o.entry = row * p.n + at * 8;
  o.byte = row * p.bytes + at * p.bits;
  o.entries = row < p.rows ? int(metal::min(8l, p.n - at * 8)) : 0;
  return o;
}
METAL_FUNC Octet octet_of(constant ScalarParams& p, uint group, uint tid) {
  return octet_of(p, long(group) * SCALAR_THREADS + tid);
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

// Four entries of BITS <= 4 bits, one to a byte, next to each other; and back.
template <int BITS>
METAL_FUNC uint join_entries(uint x) {
  x &= ((1u << BITS) - 1) * 0x01010101u;
  x = (x | x >> (8 - BITS)) & ((1u << 2 * BITS) - 1) * 0x00010001u;
  return (x | x >> (16 - 2 * BITS)) & ((1u << 4 * BITS) - 1);
}
template <int BITS>
METAL_FUNC uint part_entries(uint x) {
  x &= (1u << 4 * BITS) - 1;
  x = (x | x << (16 - 2 * BITS)) & ((1u << 2 * BITS) - 1) * 0x00010001u;
  return (x | x << (8 - BITS)) & ((1u << BITS) - 1) * 0x01010101u;
}

// The 2 BITS bytes of 16 entries: 8 BITS bits in each half.
template <int BITS>
METAL_FUNC void store_halves(device uchar* out, uint low, uint high) {
  if (BITS == 4) {
    *(device uint2*)out = uint2(low, high);
  } else if (BITS == 2) {
    *(device uint*)out = low | high << 16;
  } else if (BITS == 1) {
    *(device ushort*)out = ushort(low | high << 8);
  } else {
    device ushort* words = (device ushort*)out;
    words[0] = ushort(low & 0xffff);
    words[1] = ushort(low >> 16 | (high & 0xff) << 8);
    words[2] = ushort(high >> 8);
  }
}
template <int BITS>
METAL_FUNC uint2 load_halves(device const uchar* in) {
  if (BITS == 4)
    return *(device const uint2*)in;
  if (BITS == 2) {
    const uint word = *(device const uint*)in;
    return uint2(word & 0xffff, word >> 16);
  }
  if (BITS == 1) {
    const uint word = *(device const ushort*)in;
    return uint2(word & 0xff, word >> 8);
  }
  device const ushort* words = (device const ushort*)in;
  const uint middle = words[1];
  return uint2(words[0] | (middle & 0xff) << 16, middle >> 8 | uint(words[2]) << 8);
}

// Chunks of 16 entries of one row, all loads of a thread before its first store.
template <int BITS>
METAL_FUNC void pack_chunks(device const uchar* indices, device uchar* packed, long first,
                            long chunks) {
  uint4 x[SCALAR_CHUNKS];
  UNROLL
  for (int u = 0; u < SCALAR_CHUNKS; u++)
    x[u] = ((device const uint4*)indices)[metal::min(first + u * SCALAR_THREADS, chunks - 1)];
  UNROLL
  for (int u = 0; u < SCALAR_CHUNKS; u++) {
    const long at = first + u * SCALAR_THREADS;
    const uint low = join_entries<BITS>(x[u].x) | join_entries<BITS>(x[u].y) << 4 * BITS;
    const uint high = join_entries<BITS>(x[u].z) | join_entries<BITS>(x[u].w) << 4 * BITS;
    if (at < chunks)
      store_halves<BITS>(packed + at * 2 * BITS, low, high);
  }
}
template <int BITS>
METAL_FUNC void unpack_chunks(device const uchar* packed, device uchar* indices, long first,
                              long chunks) {
  uint2 x[SCALAR_CHUNKS];
  UNROLL
  for (int u = 0; u < SCALAR_CHUNKS; u++)
    x[u] =
        load_halves<BITS>(packed + metal::min(first + u * SCALAR_THREADS, chunks - 1) * 2 * BITS);
  UNROLL
  for (int u = 0; u < SCALAR_CHUNKS; u++) {
    const long at = first + u * SCALAR_THREADS;
    if (at < chunks)
      ((device uint4*)indices)[at] =
          uint4(part_entries<BITS>(x[u].x), part_entries<BITS>(x[u].x >> 4 * BITS),
                part_entries<BITS>(x[u].y), part_entries<BITS>(x[u].y >> 4 * BITS));
  }
}

template <typename C>
METAL_FUNC void pack_octet(device const C* indices, device uchar* packed, Octet o, int bits) {
  BitWriter w = {packed + o.byte, 0, 0};
  for (int j = 0; j < o.entries; j++)
    put_bits(w, uint(indices[o.entry + j]) & ((1u << bits) - 1), bits);
  put_rest(w);
}
template <typename C>
METAL_FUNC void unpack_octet(device const uchar* packed, device C* indices, Octet o, int bits) {
  BitReader r = {packed + o.byte, 0, 0};
  for (int j = 0; j < o.entries; j++)
    indices[o.entry + j] = C(get_bits(r, bits));
}

// A threadgroup takes SCALAR_CHUNKS chunks, or twice as many octets, per thread. With p.wide there
// is one row of at most 4 bits per entry, and the first threads also take what fills no chunk.
template <typename C>
kernel void pack_bits(device const C* indices [[buffer(0)]], device uchar* packed [[buffer(1)]],
                      constant ScalarParams& p [[buffer(2)]],
                      uint3 tgid [[threadgroup_position_in_grid]],
                      uint tid [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint sg [[simdgroup_index_in_threadgroup]]) {
  if (!p.wide) {
    const long first = long(tgid.x) * (2 * SCALAR_CHUNKS * SCALAR_THREADS) + tid;
    for (int u = 0; u < 2 * SCALAR_CHUNKS; u++)
      pack_octet(indices, packed, octet_of(p, first + u * SCALAR_THREADS), p.bits);
    return;
  }
  device const uchar* bytes = (device const uchar*)indices;
  const long first = long(tgid.x) * (SCALAR_CHUNKS * SCALAR_THREADS) + tid, chunks = p.n / 16;
  if (chunks > 0) {
    if (p.bits == 1)
      pack_chunks<1>(bytes, packed, first, chunks);
    else if (p.bits == 2)
      pack_chunks<2>(bytes, packed, first, chunks);
    else if (p.bits == 3)
      pack_chunks<3>(bytes, packed, first, chunks);
    else
      pack_chunks<4>(bytes, packed, first, chunks);
  }
  if (first < 2)
    pack_octet(indices, packed, octet_of(p, 2 * chunks + first), p.bits);
}

template <typename C>
kernel void unpack_bits(device const uchar* packed [[buffer(0)]], device C* indices [[buffer(1)]],
                        constant ScalarParams& p [[buffer(2)]],
                        uint3 tgid [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint sg [[simdgroup_index_in_threadgroup]]) {
  if (!p.wide) {
    const long first = long(tgid.x) * (2 * SCALAR_CHUNKS * SCALAR_THREADS) + tid;
    for (int u = 0; u < 2 * SCALAR_CHUNKS; u++)
      unpack_octet(packed, indices, octet_of(p, first + u * SCALAR_THREADS), p.bits);
    return;
  }
  device uchar* bytes = (device uchar*)indices;
  const long first = long(tgid.x) * (SCALAR_CHUNKS * SCALAR_THREADS) + tid, chunks = p.n / 16;
  if (chunks > 0) {
    if (p.bits == 1)
      unpack_chunks<1>(packed, bytes, first, chunks);
    else if (p.bits == 2)
      unpack_chunks<2>(packed, bytes, first, chunks);
    else if (p.bits == 3)
      unpack_chunks<3>(packed, bytes, first, chunks);
    else
      unpack_chunks<4>(packed, bytes, first, chunks);
  }
  if (first < 2)
    unpack_octet(packed, indices, octet_of(p, 2 * chunks + first), p.bits);
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

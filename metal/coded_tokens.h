// Reading coded tokens: codes as a table look-up over a bit stream, scales and centres.
#pragma once

#include "params.h"
#include "prelude.h"

struct CodedTokens {
  device const uchar* codes;  // of this row and head
  device const float* table;  // of this head
  device const bfloat* scales;
  device const char* centres;
  device const bfloat* centre_scales;
};

METAL_FUNC CodedTokens coded_tokens(constant CodeParams& c, device const uchar* codes,
                                    device const float* table, device const uchar* scales,
                                    device const uchar* centres, device const uchar* centre_scales,
                                    long row_head, long head, long body, long blocks, long width) {
  CodedTokens t;
  t.codes = codes + row_head * body * c.bytes;
  t.table = table + (c.per_head ? head : 0) * (c.per_group ? c.entries : 1) * long(c.rows) * c.dims;
  t.scales = (device const bfloat*)scales + row_head * body;
  t.centres = (device const char*)centres + row_head * blocks * width;
  t.centre_scales = (device const bfloat*)centre_scales + row_head * blocks;
  return t;
}

// `window` (at most 16) bits at `bit` of a stream of n bytes, least significant bit first.
METAL_FUNC uint read_bits(device const uchar* stream, int n, int bit, int window) {
  const int byte = bit >> 3;
  uint word = stream[byte];
  if (byte + 1 < n)
    word |= uint(stream[byte + 1]) << 8;
  if (byte + 2 < n)
    word |= uint(stream[byte + 2]) << 16;
  return (word >> (bit & 7)) & ((1u << window) - 1u);
}

// Decode tokens [first, first + KT) into rows of `tile`; tokens from `end` on become zeros, so that
// a weight of zero never meets a NaN.
template <int KT, int STRIDE, int THREADS>
METAL_FUNC void decode_tile(threadgroup float* tile, constant CodeParams& c, CodedTokens t,
                            int block, int first, int end, uint tid) {
  for (int i = int(tid); i < KT * c.entries; i += THREADS) {
    const int k = i / c.entries, e = i % c.entries;
    const long token = first + k;
    threadgroup float* o = tile + k * STRIDE + e * c.dims;
    if (token >= end) {
      for (int j = 0; j < c.dims; j++)
        o[j] = 0.0f;
      continue;
    }
    const uint code = read_bits(t.codes + token * c.bytes, c.bytes, c.stride * e, c.window);
    device const float* row = t.table + ((c.per_group ? long(e) * c.rows : 0) + code) * c.dims;
    const float scale = c.scaled ? float(t.scales[token]) : 1.0f;
    const long at = token / block;
    const float unit = c.centred ? float(t.centre_scales[at]) : 0.0f;
    for (int j = 0; j < c.dims; j++) {
      float v = row[j] * scale;
      if (c.centred) {
        v = metal::fma(float(t.centres[at * c.entries * c.dims + e * c.dims + j]), unit, v);
      }
      o[j] = v;
    }
  }
}

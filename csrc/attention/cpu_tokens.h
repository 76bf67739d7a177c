// Reading tokens: chunks of channels of coded, centre or tail tokens as float32.
#pragma once

#include "cpu/vector.h"

namespace vqkv::VQKV_VARIANT {

constexpr int kLineFloats = 8192;  // table part that should stay in the first-level cache
constexpr int kTokenBytes = 128;   // codes of one token and chunk: 64 entries of 16 bits

typedef uint64_t Word8 __attribute__((vector_size(64)));
template <typename T>
struct Eight {
  typedef T V __attribute__((vector_size(8 * sizeof(T))));
};

enum class Kind { coded, centres, tail };

/** Entries of a chunk: few enough that their part of a per-entry table stays cached. */
VQKV_INLINE int chunk_entries(const CodeParams& c) {
  const int widest = c.dims < kChunkDims ? kChunkDims / c.dims : 1;
  if (!c.per_group) {
    return widest;
  }
  int cached = kLineFloats / (c.rows * c.dims);
  const int narrowest = (kWidth + c.dims - 1) / c.dims;
  cached = cached < narrowest ? narrowest : cached;
  return cached < widest ? cached : widest;
}

VQKV_INLINE int chunk_dims(const Tokens& t, Kind kind) {
  return kind == Kind::coded ? chunk_entries(*t.code) * t.code->dims : kChunkDims;
}

/** Indices of entries [entry, entry + count) of one token, count <= kChunkDims. */
template <typename Index>
void read_bits(const Tokens& t, int64_t token, int entry, int count, Index* out) {
  const CodeParams& c = *t.code;
  const int64_t bit = int64_t(c.stride) * entry;
  const int64_t last = bit + int64_t(c.stride) * (count - 1) + c.window;
  const uint8_t* p = t.codes + token * c.bytes + bit / 8;
  uint8_t copy[kTokenBytes + 16];
  const int64_t used = (last + 7) / 8 - bit / 8;
  if (t.codes_end - p < used + 8) {  // words are read whole
    __builtin_memcpy(copy, p, used);
    p = copy;
  }
  const uint32_t mask = (1u << c.window) - 1;
  int64_t b = bit % 8;
  int e = 0;
  if (7 + 7 * c.stride + c.window <= 64) {
    // Eight entries are `stride` whole bytes, so one word holds them at any alignment.
    const Word8 shifts = Word8{0, 1, 2, 3, 4, 5, 6, 7} * uint64_t(c.stride) + uint64_t(b);
    for (; e + 8 <= count; e += 8, p += c.stride) {
      uint64_t word;
      __builtin_memcpy(&word, p, 8);
      auto entries =
          __builtin_convertvector((word >> shifts) & uint64_t(mask), typename Eight<Index>::V);
      __builtin_memcpy(out + e, &entries, sizeof(entries));
    }
  } else if (7 + 3 * c.stride + c.window <= 64) {
    for (; e + 4 <= count; e += 4, b += 4 * c.stride) {
      uint64_t word;
      __builtin_memcpy(&word, p + b / 8, 8);
      word >>= b % 8;
      for (int i = 0; i < 4; ++i, word >>= c.stride) {
        out[e + i] = Index(word & mask);
      }
    }
  }
  for (; e < count; ++e, b += c.stride) {
    uint32_t word;
    __builtin_memcpy(&word, p + b / 8, 4);
    out[e] = Index((word >> (b % 8)) & mask);
  }
}

/** Indices of `tokens` tokens, in place where they are bytes, else unpacked to `buffer`. */
VQKV_INLINE const uint8_t* byte_indices(const Tokens& t, int64_t first, int tokens, int entry,
                                        int count, uint8_t* buffer, int64_t* stride) {
  const CodeParams& c = *t.code;
  if (c.window == 8 && c.stride == 8) {
    *stride = c.bytes;
    return t.codes + first * c.bytes + entry;
  }
  *stride = count;
  for (int i = 0; i < tokens; ++i) {
    read_bits(t, first + i, entry, count, buffer + int64_t(i) * count);
  }
  return buffer;
}

/** Table rows of `tokens` x `count` entries. D is dims where known at compile time, else 0. */
template <int D, typename Index>
void decode(const Index* index, int64_t index_stride, const float* table, int64_t entry_stride,
            int row_dims, int count, int tokens, float* out, int64_t stride) {
  const int dims = D ? D : row_dims;
  for (int t = 0; t < tokens; ++t) {
    const Index* at = index + t * index_stride;
    float* to = out + t * stride;
    const float* rows = table;
    for (int e = 0; e < count; ++e, to += dims, rows += entry_stride) {
      const float* row = rows + int64_t(at[e]) * dims;
      if (D) {
        __builtin_memcpy(to, row, D * sizeof(float));
      } else {
        for (int i = 0; i < dims; ++i) {
          to[i] = row[i];
        }
      }
    }
  }
}

template <typename Index>
void decode_any(const Tokens& t, const Index* index, int64_t index_stride, int entry, int count,
                int tokens, float* out, int64_t stride) {
  const CodeParams& c = *t.code;
  const int64_t entry_stride = c.per_group ? int64_t(c.rows) * c.dims : 0;
  auto kernel = c.dims == 1   ? decode<1, Index>
                : c.dims == 2 ? decode<2, Index>
                : c.dims == 4 ? decode<4, Index>
                : c.dims == 8 ? decode<8, Index>
                              : decode<0, Index>;
  kernel(index, index_stride, t.table + entry * entry_stride, entry_stride, c.dims, count, tokens,
         out, stride);
}

/**
 * Channels [dim, dim + dims) of tokens [first, first + tokens) to out[token, stride], zero up to a
 * whole vector. Coded tokens come without scale and centre: callers apply both to the results.
 */
inline void read_tokens(const Tokens& t, Kind kind, int64_t first, int tokens, int dim, int dims,
                        void* index_buffer, float* out, int64_t stride) {
  if (kind == Kind::tail) {
    for (int i = 0; i < tokens; ++i) {
      to_float(t.tail, t.type, (first + i) * t.width + dim, dims, out + i * stride);
    }
  } else if (kind == Kind::centres) {
    for (int i = 0; i < tokens; ++i) {
      const float scale = bf16_to_float(t.centre_scales[first + i]);
      const int8_t* centre = t.centres + (first + i) * t.width + dim;
      for (int j = 0; j < dims; ++j) {
        out[i * stride + j] = scale * float(centre[j]);
      }
    }
  } else {
    const CodeParams& c = *t.code;
    const int entry = dim / c.dims, count = dims / c.dims;
    if (c.rows <= 256) {
      int64_t index_stride;
      auto* index = byte_indices(t, first, tokens, entry, count,
                                 static_cast<uint8_t*>(index_buffer), &index_stride);
      decode_any(t, index, index_stride, entry, count, tokens, out, stride);
    } else {
      auto* index = static_cast<uint16_t*>(index_buffer);
      for (int i = 0; i < tokens; ++i) {
        read_bits(t, first + i, entry, count, index + int64_t(i) * count);
      }
      decode_any(t, index, count, entry, count, tokens, out, stride);
    }
  }
  for (int i = 0; dims % kWidth && i < tokens; ++i) {
    fill_floats(out + i * stride + dims, kWidth - dims % kWidth, 0.0f);
  }
}

}  // namespace vqkv::VQKV_VARIANT

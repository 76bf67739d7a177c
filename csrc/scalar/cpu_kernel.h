// Bit streams of fixed-width entries. Eight entries are `bits` whole bytes; inside a 64-bit word
// they are squeezed together (or spread apart) in three steps, each on half as many, twice as wide
// fields. The loops are plain so that the compiler runs them on whole vectors of words.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "cpu/vector.h"

namespace vqkv::VQKV_VARIANT {

constexpr int kOctets = 64;  // groups of eight entries per tile
constexpr int kScalarTile = 8 * kOctets;

/** The low `n` bits of every field of `every` bits. */
VQKV_INLINE constexpr uint64_t low_bits(int n, int every) {
  uint64_t m = 0;
  for (int at = 0; at < 64; at += every) {
    m |= (n == 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1) << at;
  }
  return m;
}

/** Fields of N bits, 2 Gap apart in pairs, next to each other. */
template <int N, int Gap>
VQKV_INLINE uint64_t join(uint64_t v) {
  if constexpr (N == Gap) {
    return v;
  } else {
    constexpr uint64_t even = low_bits(N, 2 * Gap);
    return (v & even) | ((v >> (Gap - N)) & (even << N));
  }
}
template <int N, int Gap>
VQKV_INLINE uint64_t part(uint64_t v) {
  if constexpr (N == Gap) {
    return v;
  } else {
    constexpr uint64_t even = low_bits(N, 2 * Gap);
    return (v & even) | ((v << (Gap - N)) & (even << Gap));
  }
}

/** Eight bytes (B <= 8) or four 16-bit numbers, of which B bits count, as 8 B or 4 B bits. */
template <int B>
VQKV_INLINE uint64_t squeeze(uint64_t v) {
  if constexpr (B <= 8) {
    return join<4 * B, 32>(join<2 * B, 16>(join<B, 8>(v)));
  } else {
    return join<2 * B, 32>(join<B, 16>(v));
  }
}
template <int B>
VQKV_INLINE uint64_t spread(uint64_t v) {
  if constexpr (B <= 8) {
    return part<B, 8>(part<2 * B, 16>(part<4 * B, 32>(v)));
  } else {
    return part<B, 16>(part<2 * B, 32>(v));
  }
}

#ifdef __x86_64__
/** The lowest bits of a tile of bytes, by the instructions that collect one bit of every byte. */
VQKV_INLINE void pack_lowest_bits(const uint8_t* in, uint8_t* out) {
  for (int i = 0; i < kScalarTile; i += VQKV_VECTOR_BYTES) {
#if VQKV_VECTOR_BYTES == 64
    const uint64_t bits = _mm512_test_epi8_mask(_mm512_loadu_si512(in + i), _mm512_set1_epi8(1));
#elif VQKV_VECTOR_BYTES == 32
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const uint32_t bits = uint32_t(_mm256_movemask_epi8(_mm256_slli_epi16(v, 7)));
#else
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    const uint16_t bits = uint16_t(_mm_movemask_epi8(_mm_slli_epi16(v, 7)));
#endif
    __builtin_memcpy(out + i / 8, &bits, sizeof(bits));
  }
}
#endif

/** Up to kOctets groups of eight entries. */
template <int B>
VQKV_INLINE void pack_octets(const uint8_t* __restrict in, uint8_t* __restrict out, int octets) {
#ifdef __x86_64__
  if (B == 1 && octets == kOctets) {
    return pack_lowest_bits(in, out);
  }
#endif
  constexpr int words = B <= 8 ? 1 : 2;  // of eight unpacked entries
  uint64_t w[words * kOctets];
  for (int i = 0; i < words * octets; ++i) {
    uint64_t v;
    __builtin_memcpy(&v, in + 8 * i, 8);
    w[i] = squeeze<B>(v);
  }
  for (int i = 0; i < octets; ++i) {
    if constexpr (B <= 8) {
      __builtin_memcpy(out + B * i, w + i, B);
    } else {
      unsigned __int128 v = w[2 * i] | (unsigned __int128)w[2 * i + 1] << 4 * B;
      __builtin_memcpy(out + B * i, &v, B);
    }
  }
}
template <int B>
VQKV_INLINE void unpack_octets(const uint8_t* __restrict in, uint8_t* __restrict out, int octets) {
  constexpr int words = B <= 8 ? 1 : 2;
  uint64_t w[words * kOctets];
  for (int i = 0; i < octets; ++i) {
    w[words * i] = 0;
    __builtin_memcpy(w + words * i, in + B * i, B <= 8 ? B : 8);
    if constexpr (B > 8) {
      uint64_t more = 0;
      __builtin_memcpy(&more, in + B * i + 8, B - 8);
      const unsigned __int128 v = w[2 * i] | (unsigned __int128)more << 64;
      w[2 * i] &= low_bits(4 * B, 64);
      w[2 * i + 1] = uint64_t(v >> 4 * B);
    }
  }
  for (int i = 0; i < words * octets; ++i) {
    const uint64_t v = spread<B>(w[i]);
    __builtin_memcpy(out + 8 * i, &v, 8);
  }
}

/** Exactly the bytes of `count` entries are read and written. */
template <int B>
void pack_entries(const uint8_t* in, uint8_t* out, int64_t count) {
  constexpr int size = B <= 8 ? 1 : 2;
  for (; count >= 8;) {
    const int octets = count < kScalarTile ? int(count / 8) : kOctets;
    pack_octets<B>(in, out, octets);
    in += 8 * size * octets;
    out += B * octets;
    count -= 8 * octets;
  }
  if (count > 0) {
    uint8_t last[8 * size] = {}, bytes[B];
    __builtin_memcpy(last, in, count * size);
    pack_octets<B>(last, bytes, 1);
    __builtin_memcpy(out, bytes, (count * B + 7) / 8);
  }
}
template <int B>
void unpack_entries(const uint8_t* in, uint8_t* out, int64_t count) {
  constexpr int size = B <= 8 ? 1 : 2;
  for (; count >= 8;) {
    const int octets = count < kScalarTile ? int(count / 8) : kOctets;
    unpack_octets<B>(in, out, octets);
    in += B * octets;
    out += 8 * size * octets;
    count -= 8 * octets;
  }
  if (count > 0) {
    uint8_t last[8 * size], bytes[B] = {};
    __builtin_memcpy(bytes, in, (count * B + 7) / 8);
    unpack_octets<B>(bytes, last, 1);
    __builtin_memcpy(out, last, count * size);
  }
}

using BitsKernel = void (*)(const uint8_t*, uint8_t*, int64_t);
#define VQKV_BITS_KERNELS(f)                             \
  {f<1>, f<2>,  f<3>,  f<4>,  f<5>,  f<6>,  f<7>,  f<8>, \
   f<9>, f<10>, f<11>, f<12>, f<13>, f<14>, f<15>, f<16>}
constexpr BitsKernel kPack[] = VQKV_BITS_KERNELS(pack_entries);
constexpr BitsKernel kUnpack[] = VQKV_BITS_KERNELS(unpack_entries);
#undef VQKV_BITS_KERNELS

inline void pack_bits(const ScalarTile& t) {
  kPack[t.bits - 1](static_cast<const uint8_t*>(t.in), static_cast<uint8_t*>(t.out), t.count);
}

inline void unpack_bits(const ScalarTile& t) {
  kUnpack[t.bits - 1](static_cast<const uint8_t*>(t.in), static_cast<uint8_t*>(t.out), t.count);
}

/** Bounds below each value of a tile, by comparing with all of them. */
template <int Bounds>
void count_bounds(const float* x, const float* bounds, uint8_t* index) {
  constexpr int M = 4;
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  for (int i = 0; i < kScalarTile; i += M * kWidth) {
    F v[M];
    I n[M];
    for (int m = 0; m < M; ++m) {
      v[m] = load<F>(x + i + m * kWidth);
      n[m] = I{};
    }
    for (int k = 0; k < Bounds; ++k) {
      const F b = splat<F>(bounds[k]);
      for (int m = 0; m < M; ++m) {
        n[m] -= v[m] > b;  // true is -1; false for NaN
      }
    }
    for (int m = 0; m < M; ++m) {
      const Bytes bytes = __builtin_convertvector(n[m], Bytes);
      __builtin_memcpy(index + i + m * kWidth, &bytes, sizeof(bytes));
    }
  }
}

/** The same for many sorted bounds: with every fourth, then by bisection. */
template <int Bounds>
void search_bounds(const float* x, const float* bounds, uint8_t* index) {
  constexpr int coarse = (Bounds + 1) / 4 - 1;
  float fourth[coarse];
  for (int k = 0; k < coarse; ++k) {
    fourth[k] = bounds[4 * k + 3];
  }
  count_bounds<coarse>(x, fourth, index);
  int32_t at[kScalarTile];
  for (int i = 0; i < kScalarTile; ++i) {
    at[i] = 4 * index[i];
  }
  for (int step = 2; step > 0; step /= 2) {
    const float* bound = bounds + step - 1;
    for (int i = 0; i < kScalarTile; ++i) {
      at[i] += step & -int32_t(bound[at[i]] < x[i]);  // no branch to mispredict
    }
  }
  for (int i = 0; i < kScalarTile; ++i) {
    index[i] = uint8_t(at[i]);
  }
}

inline void quantize_scalar(const ScalarTile& t) {
  using Search = void (*)(const float*, const float*, uint8_t*);
  constexpr Search searches[] = {count_bounds<1>,    count_bounds<3>,   count_bounds<7>,
                                 count_bounds<15>,   count_bounds<31>,  count_bounds<63>,
                                 search_bounds<127>, search_bounds<255>};
  const float* bounds = static_cast<const float*>(t.table);
  auto* out = static_cast<uint8_t*>(t.out);
  float values[kScalarTile];
  uint8_t index[kScalarTile];
  fill_floats(values, kScalarTile, 0.0f);
  for (int64_t at = 0; at < t.count; at += kScalarTile) {
    const int n = t.count - at < kScalarTile ? int(t.count - at) : kScalarTile;
    const float* x = values;
    if (t.type == Real::f32 && n == kScalarTile) {
      x = static_cast<const float*>(t.in) + at;
    } else {
      to_float(t.in, t.type, at, n, values);
    }
    searches[t.bits - 1](x, bounds, index);
    kPack[t.bits - 1](index, out + at / 8 * t.bits, n);
  }
}

template <typename T>
void look_up_scalars(const uint8_t* index, int n, const T* table, T* out) {
  for (int i = 0; i < n; ++i) {
    out[i] = table[index[i]];
  }
}

inline void dequantize_scalar(const ScalarTile& t) {
  uint8_t index[kScalarTile];
  auto* in = static_cast<const uint8_t*>(t.in);
  for (int64_t at = 0; at < t.count; at += kScalarTile) {
    const int n = t.count - at < kScalarTile ? int(t.count - at) : kScalarTile;
    kUnpack[t.bits - 1](in + at / 8 * t.bits, index, n);
    if (t.type == Real::f32) {
      look_up_scalars(index, n, static_cast<const uint32_t*>(t.table),
                      static_cast<uint32_t*>(t.out) + at);
    } else {
      look_up_scalars(index, n, static_cast<const uint16_t*>(t.table),
                      static_cast<uint16_t*>(t.out) + at);
    }
  }
}

}  // namespace vqkv::VQKV_VARIANT

// Compiler vectors of the variant's width, and what the kernels compute with them.
#pragma once

#include <stdint.h>

#include "cpu/kernels.h"

#define VQKV_INLINE inline __attribute__((always_inline))
#ifdef __clang__
#define VQKV_UNROLL _Pragma("unroll")
#else
#define VQKV_UNROLL _Pragma("GCC unroll 16")
#endif

namespace vqkv::VQKV_VARIANT {

constexpr int kWidth = VQKV_VECTOR_BYTES / 4;

template <int N>
struct Vec {
  typedef float F __attribute__((vector_size(4 * N)));
  typedef int32_t I __attribute__((vector_size(4 * N)));
  typedef uint32_t U __attribute__((vector_size(4 * N)));
};
using F = Vec<kWidth>::F;
using I = Vec<kWidth>::I;

template <typename V>
VQKV_INLINE V load(const float* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <typename V>
VQKV_INLINE void store(float* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

template <typename V>
VQKV_INLINE V splat(float x) {
  return x - V{};  // subtracting zero is exact for every x and compiles to a broadcast
}

VQKV_INLINE float bits_to_float(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

VQKV_INLINE float bf16_to_float(uint16_t h) {
  return bits_to_float(uint32_t(h) << 16);
}

VQKV_INLINE float f16_to_float(uint16_t h) {
  // The exponent is rebiased by a product, which also makes subnormals right.
  float f = bits_to_float(uint32_t(h & 0x7fff) << 13) * 0x1p112f;
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  u |= (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return bits_to_float(u | uint32_t(h & 0x8000) << 16);
}

/** 2^x for x <= 0: relative error below 2e-7, 0 below the normal range, NaN for NaN. */
VQKV_INLINE F exp2_nonpositive(F x) {
  using U = Vec<kWidth>::U;
  const F round = splat<F>(12582912.0f);  // 1.5 * 2^23: the low bits of x + round hold the integer
  F t = x + round;
  F f = x - (t - round);
  F p = splat<F>(1.5353353e-4f);
  p = p * f + 1.3398875e-3f;
  p = p * f + 9.6184378e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  p = (F)((U)p + ((U)t << 23));
  p = x < splat<F>(-126.0f) ? F{} : p;
  return x != x ? x : p;
}

VQKV_INLINE void fill_floats(float* p, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) {
    p[i] = value;
  }
}

/** n values of x from index `at`, as float32. */
VQKV_INLINE void to_float(const void* x, Real type, int64_t at, int n, float* out) {
  if (type == Real::f32) {
    const float* p = static_cast<const float*>(x) + at;
    for (int i = 0; i < n; ++i) {
      out[i] = p[i];
    }
  } else if (type == Real::f16) {
    const uint16_t* p = static_cast<const uint16_t*>(x) + at;
    for (int i = 0; i < n; ++i) {
      out[i] = f16_to_float(p[i]);
    }
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(x) + at;
    for (int i = 0; i < n; ++i) {
      out[i] = bf16_to_float(p[i]);
    }
  }
}

}  // namespace vqkv::VQKV_VARIANT

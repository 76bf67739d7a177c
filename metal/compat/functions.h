// MSL's math functions in C++, for the simulator and CUDA.
#pragma once

#include <cfloat>
#include <cmath>

#include "types.h"

#ifndef M_LOG2E_F
#define M_LOG2E_F 1.44269504088896340736f
#endif
#ifndef M_PI_F
#define M_PI_F 3.14159265358979323846f
#endif

namespace metal {

// half functions round the float result, as MSL's do
#define MSL_UNARY(name, expr)    \
  MSL_FN float name(float x) {   \
    return expr;                 \
  }                              \
  MSL_FN half name(half h) {     \
    return half(name(float(h))); \
  }
MSL_UNARY(exp, ::expf(x))
#if defined(__CUDA_ARCH__)
MSL_FN float fast_exp2(float x) {  // as exact as Metal's
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MSL_UNARY(exp2, fast_exp2(x))
#else
MSL_UNARY(exp2, ::exp2f(x))
#endif
MSL_UNARY(log, ::logf(x))
MSL_UNARY(log2, ::log2f(x))
MSL_UNARY(sqrt, ::sqrtf(x))
MSL_UNARY(floor, ::floorf(x))
MSL_UNARY(ceil, ::ceilf(x))
MSL_UNARY(trunc, ::truncf(x))
MSL_UNARY(rint, ::rintf(x))
MSL_UNARY(round, ::roundf(x))
MSL_UNARY(abs, ::fabsf(x))
#if defined(__CUDA_ARCH__)
MSL_UNARY(rsqrt, ::rsqrtf(x))
#else
MSL_UNARY(rsqrt, 1.0f / ::sqrtf(x))
#endif
#undef MSL_UNARY

MSL_FN int abs(int x) {
  return x < 0 ? -x : x;
}
MSL_FN long abs(long x) {
  return x < 0 ? -x : x;
}
MSL_FN float fma(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
MSL_FN half fma(half a, half b, half c) {
  return half(::fmaf(float(a), float(b), float(c)));
}

// By bits, so that fast-math builds of the host cannot fold them.
MSL_FN bool isnan(float x) {
  return (bit_cast<uint32_t>(x) & 0x7fffffffu) > 0x7f800000u;
}
MSL_FN bool isnan(half x) {
  return isnan(float(x));
}
MSL_FN bool isfinite(float x) {
  return (bit_cast<uint32_t>(x) & 0x7f800000u) != 0x7f800000u;
}
MSL_FN bool isfinite(half x) {
  return isfinite(float(x));
}

// the operand that is a number wins over NaN
#define MSL_MINMAX(T)               \
  MSL_FN T min(T a, T b) {          \
    return b < a || a != a ? b : a; \
  }                                 \
  MSL_FN T max(T a, T b) {          \
    return a < b || a != a ? b : a; \
  }                                 \
  MSL_FN T clamp(T x, T lo, T hi) { \
    return min(max(x, lo), hi);     \
  }
MSL_MINMAX(char)
MSL_MINMAX(uchar)
MSL_MINMAX(short)
MSL_MINMAX(ushort)
MSL_MINMAX(int)
MSL_MINMAX(uint)
MSL_MINMAX(long)
MSL_MINMAX(ulong)
MSL_MINMAX(half)
#if defined(__CUDA_ARCH__)
MSL_FN float min(float a, float b) {
  return ::fminf(a, b);
}
MSL_FN float max(float a, float b) {
  return ::fmaxf(a, b);
}
MSL_FN float clamp(float x, float lo, float hi) {
  return min(max(x, lo), hi);
}
#else
MSL_MINMAX(float)
#endif
#undef MSL_MINMAX

MSL_FN float saturate(float x) {
#if defined(__CUDA_ARCH__)
  return __saturatef(x);
#else
  return min(max(x, 0.0f), 1.0f);
#endif
}

template <typename T>
MSL_FN T select(T a, T b, bool c) {
  return c ? b : a;
}

template <typename T, int N>
MSL_FN vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++)
    a[i] = min(a[i], b[i]);
  return a;
}
template <typename T, int N>
MSL_FN vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++)
    a[i] = max(a[i], b[i]);
  return a;
}
template <typename T, int N>
MSL_FN vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++)
    a[i] = fma(a[i], b[i], c[i]);
  return a;
}
template <typename T, int N>
MSL_FN vec<T, N> abs(vec<T, N> a) {
  for (int i = 0; i < N; i++)
    a[i] = abs(a[i]);
  return a;
}
template <typename T, int N>
MSL_FN T dot(vec<T, N> a, vec<T, N> b) {
  T r = a[0] * b[0];
  for (int i = 1; i < N; i++)
    r += a[i] * b[i];
  return r;
}

// `bits` bits of x from bit `offset` on
MSL_FN uint extract_bits(uint x, uint offset, uint bits) {
#if defined(__CUDA_ARCH__)
  if (bits == 8 && offset % 8 == 0)
    return __byte_perm(x, 0, 0x4440u | offset / 8);
#endif
  return (x >> offset) & ((1u << bits) - 1u);
}

#if defined(__CUDA_ARCH__)
MSL_FN uint popcount(uint x) {
  return uint(__popc(x));
}
MSL_FN uint clz(uint x) {
  return uint(__clz(int(x)));
}
MSL_FN uint ctz(uint x) {
  return x ? uint(__ffs(int(x)) - 1) : 32u;
}
#else
MSL_FN uint popcount(uint x) {
  return uint(__builtin_popcount(x));
}
MSL_FN uint clz(uint x) {
  return x ? uint(__builtin_clz(x)) : 32u;
}
MSL_FN uint ctz(uint x) {
  return x ? uint(__builtin_ctz(x)) : 32u;
}
#endif

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  MSL_FN explicit simd_vote(vote_t v) : votes(v) {}
  MSL_FN explicit operator vote_t() const { return votes; }
};

struct op_add {
  template <typename T>
  MSL_FN T operator()(T a, T b) const {
    return T(a + b);
  }
};
struct op_max {
  template <typename T>
  MSL_FN T operator()(T a, T b) const {
    return metal::max(a, b);
  }
};
struct op_min {
  template <typename T>
  MSL_FN T operator()(T a, T b) const {
    return metal::min(a, b);
  }
};

}  // namespace metal

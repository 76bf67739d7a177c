// Scalar and vector types of MSL in C++, for the simulator and CUDA.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define MSL_FN __host__ __device__ __forceinline__
#else
#define MSL_FN inline __attribute__((always_inline))
#endif

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

static_assert(sizeof(long) == 8, "MSL's long has 64 bits");
static_assert(static_cast<char>(-1) < 0, "MSL's char is signed: compile with -fsigned-char");

namespace metal {

template <typename To, typename From>
MSL_FN To bit_cast(const From& f) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the sizes differ");
  To t;
  memcpy(&t, &f, sizeof(To));
  return t;
}

MSL_FN uint16_t float_to_bfloat_bits(float f) {
  const uint32_t u = bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u)
    return uint16_t((u >> 16) | 0x40u);  // NaN stays NaN
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
MSL_FN float bfloat_bits_to_float(uint16_t h) {
  return bit_cast<float>(uint32_t(h) << 16);
}

#if defined(__CUDA_ARCH__)
MSL_FN uint16_t float_to_half_bits(float f) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
MSL_FN float half_bits_to_float(uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
#else
MSL_FN uint16_t float_to_half_bits(float f) {
  uint32_t u = bit_cast<uint32_t>(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u)
    return uint16_t(sign | 0x7e00u);
  if (u >= 0x477ff000u)
    return uint16_t(sign | 0x7c00u);  // rounds to infinity
  if (u < 0x38800000u) {              // subnormal: this sum rounds for us
    return uint16_t(sign | (bit_cast<uint32_t>(bit_cast<float>(u) + 0.5f) - 0x3f000000u));
  }
  u += 0xfffu + ((u >> 13) & 1u);
  return uint16_t(sign | ((u - 0x38000000u) >> 13));
}
MSL_FN float half_bits_to_float(uint16_t h) {
  const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  return bit_cast<float>(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) |
                         (mantissa << 13));
}
#endif

// Stored as 16 bits; every operation rounds to the type, as in MSL.
#define MSL_16BIT(NAME)                                                              \
  struct NAME {                                                                      \
    uint16_t bits;                                                                   \
    NAME() = default;                                                                \
    template <typename A, typename = std::enable_if_t<std::is_arithmetic<A>::value>> \
    MSL_FN NAME(A a) : bits(float_to_##NAME##_bits(float(a))) {}                     \
    MSL_FN operator float() const { return NAME##_bits_to_float(bits); }             \
  };
MSL_16BIT(half)
MSL_16BIT(bfloat)
#undef MSL_16BIT

template <typename T>
struct is_16bit
    : std::integral_constant<bool, std::is_same<T, half>::value || std::is_same<T, bfloat>::value> {
};
template <typename T>
using if_16bit = std::enable_if_t<is_16bit<T>::value>;
template <typename T, typename I>
using if_16bit_and_integer = std::enable_if_t<is_16bit<T>::value && std::is_integral<I>::value>;

#define MSL_OP(op)                                                         \
  template <typename T, typename = if_16bit<T>>                            \
  MSL_FN T operator op(T a, T b) {                                         \
    return T(float(a) op float(b));                                        \
  }                                                                        \
  template <typename T, typename I, typename = if_16bit_and_integer<T, I>> \
  MSL_FN T operator op(T a, I b) {                                         \
    return a op T(b);                                                      \
  }                                                                        \
  template <typename T, typename I, typename = if_16bit_and_integer<T, I>> \
  MSL_FN T operator op(I a, T b) {                                         \
    return T(a) op b;                                                      \
  }                                                                        \
  template <typename T, typename B, typename = if_16bit<T>>                \
  MSL_FN T& operator op## = (T & a, B b) {                                 \
    return a = T(a op b);                                                  \
  }
MSL_OP(+)
MSL_OP(-)
MSL_OP(*)
MSL_OP(/)
#undef MSL_OP
template <typename T, typename = if_16bit<T>>
MSL_FN T operator-(T a) {
  return bit_cast<T>(uint16_t(a.bits ^ 0x8000u));
}

template <typename T, int N>
struct vec;

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    struct {
      T x, y;
    };
    T at[2];
  };
  vec() = default;
  MSL_FN constexpr vec(T s) : x(s), y(s) {}
  MSL_FN constexpr vec(T a, T b) : x(a), y(b) {}
  template <typename U>
  MSL_FN explicit vec(const vec<U, 2>& v) : x(T(v.x)), y(T(v.y)) {}
  MSL_FN T& operator[](int i) { return at[i]; }
  MSL_FN const T& operator[](int i) const { return at[i]; }
};

// As large as four elements, as in MSL.
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    struct {
      T x, y, z;
    };
    T at[3];
  };
  vec() = default;
  MSL_FN constexpr vec(T s) : x(s), y(s), z(s) {}
  MSL_FN constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  template <typename U>
  MSL_FN explicit vec(const vec<U, 3>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  MSL_FN T& operator[](int i) { return at[i]; }
  MSL_FN const T& operator[](int i) const { return at[i]; }
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    struct {
      T x, y, z, w;
    };
    struct {
      vec<T, 2> xy, zw;
    };
    T at[4];
  };
  vec() = default;
  MSL_FN constexpr vec(T s) : x(s), y(s), z(s), w(s) {}
  MSL_FN constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  MSL_FN vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  template <typename U>
  MSL_FN explicit vec(const vec<U, 4>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  MSL_FN T& operator[](int i) { return at[i]; }
  MSL_FN const T& operator[](int i) const { return at[i]; }
};

template <typename T>
struct same {  // keeps an argument out of template deduction
  using type = T;
};

#define MSL_OP(op)                                                      \
  template <typename T, int N>                                          \
  MSL_FN vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {              \
    vec<T, N> r;                                                        \
    for (int i = 0; i < N; i++)                                         \
      r[i] = T(a[i] op b[i]);                                           \
    return r;                                                           \
  }                                                                     \
  template <typename T, int N>                                          \
  MSL_FN vec<T, N> operator op(vec<T, N> a, typename same<T>::type b) { \
    return a op vec<T, N>(b);                                           \
  }                                                                     \
  template <typename T, int N>                                          \
  MSL_FN vec<T, N> operator op(typename same<T>::type a, vec<T, N> b) { \
    return vec<T, N>(a) op b;                                           \
  }                                                                     \
  template <typename T, int N, typename U>                              \
  MSL_FN vec<T, N>& operator op## = (vec<T, N> & a, U b) {              \
    return a = a op b;                                                  \
  }
MSL_OP(+)
MSL_OP(-)
MSL_OP(*)
MSL_OP(/)
MSL_OP(%)
MSL_OP(&)
MSL_OP(|)
MSL_OP(^)
MSL_OP(<<)
MSL_OP(>>)
#undef MSL_OP
template <typename T, int N>
MSL_FN vec<T, N> operator-(vec<T, N> a) {
  for (int i = 0; i < N; i++)
    a[i] = T(-a[i]);
  return a;
}

}  // namespace metal

template <typename To, typename From>
MSL_FN To as_type(const From& f) {
  return metal::bit_cast<To>(f);
}

using metal::bfloat;
using metal::half;

// names.h maps the MSL spelling to these
#define MSL_VECTORS(T)                 \
  typedef metal::vec<T, 2> msl_##T##2; \
  typedef metal::vec<T, 3> msl_##T##3; \
  typedef metal::vec<T, 4> msl_##T##4;
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

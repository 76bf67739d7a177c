// Randomized Hadamard transform of rows, and scalar quantisation of the result. Lanes hold
// kHadamardRows rows: a tile is [channels, kHadamardRows], so every step is the same for all rows
// and no sum crosses lanes. Sums are in the order of metal/hadamard.h and never fused, so that all
// instruction sets give the same bits; kernels for GPUs fuse products with sums.
#pragma once

#include "../../metal/hadamard_tables.h"
#include "cpu/vector.h"

namespace vqkv::VQKV_VARIANT {

constexpr int kRows = kHadamardRows;
constexpr int kChunk = 64;  // channels converted at a time
static_assert(kRows % kWidth == 0 && kRows % 4 == 0);

using F4 = Vec<4>::F;

/** v, opaque to the compiler: a product passed through it is not fused with the sum that takes it.
 */
template <typename V>
VQKV_INLINE V rounded(V v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#endif
  return v;
}

VQKV_INLINE uint32_t float_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

/** To the nearest, ties to even; NaN stays NaN. */
VQKV_INLINE uint16_t float_to_bf16(float f) {
  const uint32_t u = float_bits(f);
  const uint32_t nearest = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : nearest);
}

VQKV_INLINE uint16_t float_to_f16(float f) {
  const uint32_t u = float_bits(f), a = u & 0x7fffffff;
  // below the normal range a sum rounds for us; above, the exponent is rebiased
  const uint32_t tiny = float_bits(bits_to_float(a) + 0.5f) - 0x3f000000;
  const uint32_t normal = (a + 0xfff + ((a >> 13) & 1) - 0x38000000) >> 13;
  uint32_t h = a < 0x38800000 ? tiny : normal;
  h = a >= 0x477ff000 ? 0x7c00 : h;
  h = a > 0x7f800000 ? 0x7e00 : h;
  return uint16_t(h | (u >> 16 & 0x8000));
}

/** n values as `type`, from index `at` of out. */
VQKV_INLINE void from_float(const float* x, int n, Real type, void* out, int64_t at) {
  if (type == Real::f32) {
    __builtin_memcpy(static_cast<float*>(out) + at, x, n * sizeof(float));
  } else if (type == Real::f16) {
    uint16_t* p = static_cast<uint16_t*>(out) + at;
    for (int i = 0; i < n; ++i) {
      p[i] = float_to_f16(x[i]);
    }
  } else {
    uint16_t* p = static_cast<uint16_t*>(out) + at;
    for (int i = 0; i < n; ++i) {
      p[i] = float_to_bf16(x[i]);
    }
  }
}

VQKV_INLINE void transpose4(F4* v) {
  F4 a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
  F4 b = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
  F4 c = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
  F4 d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
  v[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  v[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  v[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  v[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

/** Rows [first, first + n) as a tile, times the signs unless these are applied last; zeros in the
 * lanes beyond n. Writes up to 3 channels too many. */
inline void load_rows(const HadamardTile& t, int64_t first, int n, float* y) {
  float rows[kRows * kChunk];
  if (n < kRows) {
    fill_floats(rows, kRows * kChunk, 0.0f);
  }
  for (int c0 = 0; c0 < t.width; c0 += kChunk) {
    const int wide = t.width - c0 < kChunk ? t.width - c0 : kChunk;
    for (int i = 0; i < n; ++i) {
      to_float(t.x, t.type, (first + i) * t.width + c0, wide, rows + i * kChunk);
    }
    for (int c = 0; c < wide; c += 4) {
      float sign[4];
      for (int k = 0; k < 4; ++k) {
        sign[k] = t.inverse || c + k >= wide ? 1.0f : t.signs[c0 + c + k];
      }
      for (int i = 0; i < kRows; i += 4) {
        F4 v[4];
        for (int k = 0; k < 4; ++k) {
          v[k] = load<F4>(rows + (i + k) * kChunk + c);
        }
        transpose4(v);
        for (int k = 0; k < 4; ++k) {
          store(y + (c0 + c + k) * kRows + i, rounded(v[k] * sign[k]));
        }
      }
    }
  }
}

/** The transform's sums and differences at distance h and, Two, at 2 h. */
template <bool Two>
void butterflies(float* y, int width, int h) {
  const int64_t step = int64_t(h) * kRows;
  for (int c = 0; c < width; c += (Two ? 4 : 2) * h) {
    float* p = y + int64_t(c) * kRows;
    for (int64_t i = 0; i < step; i += kWidth, p += kWidth) {
      const F a = load<F>(p), b = load<F>(p + step);
      if constexpr (Two) {
        const F d = load<F>(p + 2 * step), e = load<F>(p + 3 * step);
        const F a1 = a + b, b1 = a - b, d1 = d + e, e1 = d - e;
        store(p, a1 + d1);
        store(p + step, b1 + e1);
        store(p + 2 * step, a1 - d1);
        store(p + 3 * step, b1 - e1);
      } else {
        store(p, a + b);
        store(p + step, a - b);
      }
    }
  }
}

/** The stored matrix, over channels that are n apart. */
template <int M>
void mix(float* y, int n, const uint32_t* matrix, bool transposed) {
  float sign[M * M];
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < M; ++j) {
      sign[i * M + j] = ((transposed ? matrix[j] >> i : matrix[i] >> j) & 1) != 0 ? 1.0f : -1.0f;
    }
  }
  F x[M];
  for (int i = 0; i < n * kRows; i += kWidth) {
    for (int j = 0; j < M; ++j) {
      x[j] = load<F>(y + i + j * n * kRows);
    }
    for (int k = 0; k < M; k += 4) {
      F sum[4];
      for (int l = 0; l < 4; ++l) {
        sum[l] = x[0] * sign[(k + l) * M];
      }
      for (int j = 1; j < M; ++j) {
        for (int l = 0; l < 4; ++l) {
          sum[l] = x[j] * sign[(k + l) * M + j] + sum[l];  // the product is exact
        }
      }
      for (int l = 0; l < 4; ++l) {
        store(y + i + (k + l) * n * kRows, sum[l]);
      }
    }
  }
}

/** A tile times the matrix (or its transpose), without the scale. */
inline void transform(const HadamardTile& t, float* y) {
  const int n = t.width / t.order;
  int h = 1;
  for (; 4 * h <= n; h *= 4) {
    butterflies<true>(y, t.width, h);
  }
  if (2 * h <= n) {
    butterflies<false>(y, t.width, h);
  }
  static constexpr uint32_t h12[] = {HADAMARD_12}, h20[] = {HADAMARD_20}, h28[] = {HADAMARD_28};
  if (t.order == 12) {
    mix<12>(y, n, h12, t.inverse);
  } else if (t.order == 20) {
    mix<20>(y, n, h20, t.inverse);
  } else if (t.order == 28) {
    mix<28>(y, n, h28, t.inverse);
  }
}

inline void hadamard(const HadamardTile& t) {
  float* y = t.scratch;
  float rows[kRows * kChunk];
  for (int64_t first = 0; first < t.count; first += kRows) {
    const int n = t.count - first < kRows ? int(t.count - first) : kRows;
    load_rows(t, first, n, y);
    transform(t, y);
    for (int c0 = 0; c0 < t.width; c0 += kChunk) {
      const int wide = t.width - c0 < kChunk ? t.width - c0 : kChunk;
      for (int c = 0; c < wide; c += 4) {
        for (int i = 0; i < kRows; i += 4) {
          F4 v[4];
          for (int k = 0; k < 4; ++k) {
            v[k] = rounded(load<F4>(y + (c0 + c + k) * kRows + i) * t.scale);
            if (t.inverse && c + k < wide) {
              v[k] = v[k] * t.signs[c0 + c + k];
            }
          }
          transpose4(v);
          for (int k = 0; k < 4; ++k) {
            store(rows + (i + k) * kChunk + c, v[k]);
          }
        }
      }
      for (int i = 0; i < n; ++i) {
        from_float(rows + i * kChunk, wide, t.out_type, t.out, (first + i) * t.width + c0);
      }
    }
  }
}

}  // namespace vqkv::VQKV_VARIANT

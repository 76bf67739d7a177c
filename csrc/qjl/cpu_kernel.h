// Products with a sketch and with sign codes. Both are register-blocked products of rows with a
// panel of kQjlPanel lanes: sketch rows packed once per call, or tokens whose bits were expanded to
// +-1. Every product is one chain over its channels, so no result depends on the blocking.
#pragma once

#include "cpu/vector.h"

#if defined(__SSE2__)
#include <immintrin.h>  // its functions are always inlined
#endif

namespace vqkv::VQKV_VARIANT {

constexpr int kQjlVectors = 2;  // of a row of the register block
constexpr int kQjlLanes = kQjlVectors * kWidth;
constexpr int kQjlBlock = kWidth == 16 ? 12 : 6;  // rows of the register block
static_assert(kQjlPanel % kQjlLanes == 0 && kQjlLanes % 8 == 0);

/** Bit i: lane i is not negative; NaN counts as negative. */
VQKV_INLINE uint32_t nonnegative(F y) {
#if VQKV_VECTOR_BYTES == 64 && defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)y, _mm512_setzero_ps(), _CMP_GE_OQ);
#elif VQKV_VECTOR_BYTES == 32 && defined(__AVX__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)y, _mm256_setzero_ps(), _CMP_GE_OQ)));
#elif VQKV_VECTOR_BYTES == 16 && defined(__SSE2__)
  return uint32_t(_mm_movemask_ps(_mm_cmpge_ps((__m128)y, _mm_setzero_ps())));
#else
  const I yes = y >= F{};
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) {
    bits |= uint32_t(yes[i] & 1) << i;
  }
  return bits;
#endif
}

/** use(row, sum[kQjlVectors]) with x[row][n] . panel[n][lanes] for R rows. */
template <int R, typename Use>
VQKV_INLINE void panel_block(const float* x, int64_t stride, int n, const float* panel, Use use) {
  F sum[R][kQjlVectors]{};
  for (int i = 0; i < n; ++i, panel += kQjlPanel) {
    F lanes[kQjlVectors];
    VQKV_UNROLL
    for (int v = 0; v < kQjlVectors; ++v) {
      lanes[v] = load<F>(panel + v * kWidth);
    }
    VQKV_UNROLL
    for (int r = 0; r < R; ++r) {
      const float value = x[r * stride + i];
      VQKV_UNROLL
      for (int v = 0; v < kQjlVectors; ++v) {
        sum[r][v] += lanes[v] * value;
      }
    }
  }
  VQKV_UNROLL
  for (int r = 0; r < R; ++r) {
    use(r, sum[r]);
  }
}

/** use(row, lane, sum[kQjlVectors]) for rows and the first `lanes` lanes of a panel. */
template <typename Use>
VQKV_INLINE void panel_products(const float* x, int rows, int n, const float* panel, int lanes,
                                Use use) {
  for (int lane = 0; lane < lanes; lane += kQjlLanes) {
    int row = 0;
    auto emit = [&](int r, const F* sum)
                    __attribute__((always_inline)) { use(row + r, lane, sum); };
    for (; row + kQjlBlock <= rows; row += kQjlBlock) {
      panel_block<kQjlBlock>(x + int64_t(row) * n, n, n, panel + lane, emit);
    }
    for (; row + kQjlBlock / 3 <= rows; row += kQjlBlock / 3) {
      panel_block<kQjlBlock / 3>(x + int64_t(row) * n, n, n, panel + lane, emit);
    }
    for (; row < rows; ++row) {
      panel_block<1>(x + int64_t(row) * n, n, n, panel + lane, emit);
    }
  }
}

VQKV_INLINE uint16_t rounded_to_bf16(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  const uint32_t rounded = u + 0x7fffu + (u >> 16 & 1u);
  return uint16_t((f != f ? u | 0x400000u : rounded) >> 16);
}

/** ||x|| as bfloat16: eight partial sums, as the Metal kernel has them. */
inline uint16_t norm_bf16(const float* x, int n) {
  constexpr int width = kWidth < 8 ? kWidth : 8, N = 8 / width;
  using V = Vec<width>::F;
  V sum[N]{};
  auto add = [&](const float* p) __attribute__((always_inline)) {
    for (int v = 0; v < N; ++v) {
      const V value = load<V>(p + v * width);
      sum[v] += value * value;
    }
  };
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    add(x + i);
  }
  float s[8] = {};
  if (i < n) {
    __builtin_memcpy(s, x + i, (n - i) * sizeof(float));
    add(s);
  }
  __builtin_memcpy(s, sum, sizeof(s));
  const float total = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  return rounded_to_bf16(__builtin_sqrtf(total));
}

inline void qjl_products(const QjlTile& t) {
  const float* x = static_cast<const float*>(t.x);
  if (t.type != Real::f32) {
    to_float(t.x, t.type, 0, t.count * t.dims, t.scratch);
    x = t.scratch;
  }
  for (int first = 0; first < t.channels; first += kQjlPanel) {
    const float* panel = t.sketch + int64_t(first) * t.dims;
    const int left = t.channels - first, lanes = left < kQjlPanel ? left : kQjlPanel;
    auto here = [&](int lane) __attribute__((always_inline)) {
      return lanes - lane < kQjlLanes ? lanes - lane : kQjlLanes;
    };
    if (t.products) {
      panel_products(x, t.count, t.dims, panel, lanes,
                     [&](int row, int lane, const F* sum) __attribute__((always_inline)) {
                       float* out = t.products + int64_t(row) * t.channels + first + lane;
                       __builtin_memcpy(out, sum, here(lane) * sizeof(float));
                     });
    } else {
      panel_products(x, t.count, t.dims, panel, lanes,
                     [&](int row, int lane, const F* sum) __attribute__((always_inline)) {
                       uint32_t bits = 0;
                       for (int v = 0; v < kQjlVectors; ++v) {
                         bits |= nonnegative(sum[v]) << (v * kWidth);
                       }
                       uint8_t* out = t.signs + (int64_t(row) * t.channels + first + lane) / 8;
                       for (int i = 0; i < here(lane) / 8; ++i) {
                         out[i] = uint8_t(bits >> (8 * i));
                       }
                     });
    }
  }
  for (int row = 0; t.norms && row < t.count; ++row) {
    t.norms[row] = norm_bf16(x + int64_t(row) * t.dims, t.dims);
  }
}

/** panel[channel][kQjlPanel] of +-1; tokens beyond `count` become -1. */
inline void expand_signs(const uint8_t* signs, int count, int channels, float* panel) {
  using U = Vec<kWidth>::U;
  constexpr int N = kQjlPanel / kWidth;
  const int bytes = channels / 8;
  for (int b = 0; b < bytes; ++b) {
    uint32_t byte[kQjlPanel] = {};
    for (int i = 0; i < count; ++i) {
      byte[i] = signs[int64_t(i) * bytes + b];
    }
    for (int v = 0; v < N; ++v) {
      U u;
      __builtin_memcpy(&u, byte + v * kWidth, sizeof(u));
      for (int j = 0; j < 8; ++j) {
        const U one = (u << (31 - j) & 0x80000000u) ^ 0xbf800000u;
        __builtin_memcpy(panel + (b * 8 + j) * kQjlPanel + v * kWidth, &one, sizeof(one));
      }
    }
  }
}

inline void qjl_scores(const QjlScoresTile& t) {
  for (int first = 0; first < t.count; first += kQjlPanel) {
    const int left = t.count - first, tokens = left < kQjlPanel ? left : kQjlPanel;
    expand_signs(t.signs + int64_t(first) * (t.channels / 8), tokens, t.channels, t.scratch);
    float scale[kQjlPanel] = {};
    to_float(t.norms, t.type, first, tokens, scale);
    for (int i = 0; i < kQjlPanel; ++i) {
      scale[i] *= t.unit;
    }
    panel_products(t.queries, t.rows, t.channels, t.scratch, tokens,
                   [&](int row, int lane, const F* sum) __attribute__((always_inline)) {
                     float* out = t.out + row * t.out_stride + first + lane;
                     for (int v = 0; v < kQjlVectors; ++v, lane += kWidth, out += kWidth) {
                       const F score = sum[v] * load<F>(scale + lane);
                       const int n = tokens - lane;
                       if (n >= kWidth) {
                         store(out, score);
                       } else if (n > 0) {
                         __builtin_memcpy(out, &score, n * sizeof(float));
                       }
                     }
                   });
  }
}

}  // namespace vqkv::VQKV_VARIANT

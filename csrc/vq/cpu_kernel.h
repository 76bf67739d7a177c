// Nearest codebook row. Lanes hold input vectors and every centroid is broadcast, so the running
// minimum and its index never leave the registers and nothing of size vectors x rows exists.
#pragma once

#include "cpu/vector.h"

namespace vqkv::VQKV_VARIANT {

constexpr int kQuantizeBlocks = 4;  // vectors of lanes that share a broadcast
constexpr int kQuantizeStep = kQuantizeBlocks * kWidth;
static_assert(kQuantizeStep <= kQuantizeLanes);

/** x: [dims, kQuantizeStep]. D is dims where that is known at compile time, else 0. */
template <int D>
void nearest_rows(const float* x, const float* book, int rows, int dims, int32_t* index) {
  constexpr int M = kQuantizeBlocks;
  F best[M];
  I at[M];
  for (int m = 0; m < M; ++m) {
    best[m] = splat<F>(__builtin_inff());
    at[m] = I{};
  }
  I row{};
  for (int k = 0; k < rows; ++k, row += 1) {
    const float* c = book + int64_t(k) * dims;
    F distance[M];
    VQKV_UNROLL
    for (int m = 0; m < M; ++m) {
      F t = load<F>(x + m * kWidth) - c[0];
      distance[m] = t * t;
    }
    for (int j = 1; j < (D ? D : dims); ++j) {
      F cj = splat<F>(c[j]);
      VQKV_UNROLL
      for (int m = 0; m < M; ++m) {
        F t = load<F>(x + j * kQuantizeStep + m * kWidth) - cj;
        distance[m] = t * t + distance[m];
      }
    }
    VQKV_UNROLL
    for (int m = 0; m < M; ++m) {
      auto closer = distance[m] < best[m];
      best[m] = closer ? distance[m] : best[m];
      at[m] = closer ? row : at[m];
    }
  }
  __builtin_memcpy(index, at, sizeof(at));
}

template <typename T, typename Convert>
VQKV_INLINE void gather(const T* x, int64_t stride, int n, int dims, float* out, Convert convert) {
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < dims; ++j) {
      out[j * kQuantizeStep + i] = convert(x[i * stride + j]);
    }
  }
}

inline void gather_vectors(const QuantizeTile& t, int64_t first, int n) {
  const int64_t at = first * t.stride;
  auto* half = static_cast<const uint16_t*>(t.x);
  if (t.type == Real::f32) {
    gather(static_cast<const float*>(t.x) + at, t.stride, n, t.dims, t.scratch,
           [](float v) { return v; });
  } else if (t.type == Real::f16) {
    gather(half + at, t.stride, n, t.dims, t.scratch, [](uint16_t v) { return f16_to_float(v); });
  } else {
    gather(half + at, t.stride, n, t.dims, t.scratch, [](uint16_t v) { return bf16_to_float(v); });
  }
}

inline void quantize(const QuantizeTile& t) {
  int32_t index[kQuantizeStep];
  fill_floats(t.scratch, int64_t(t.dims) * kQuantizeStep, 0.0f);
  auto search = t.dims == 2   ? nearest_rows<2>
                : t.dims == 4 ? nearest_rows<4>
                : t.dims == 8 ? nearest_rows<8>
                              : nearest_rows<0>;
  for (int64_t first = 0; first < t.count; first += kQuantizeStep) {
    const int64_t left = t.count - first;
    const int n = left < kQuantizeStep ? int(left) : kQuantizeStep;
    gather_vectors(t, first, n);
    search(t.scratch, t.book, t.rows, t.dims, index);
    if (t.rows <= 256) {
      auto* codes = static_cast<uint8_t*>(t.codes) + first * t.code_stride;
      for (int i = 0; i < n; ++i) {
        codes[i * t.code_stride] = uint8_t(index[i]);
      }
    } else {
      auto* codes = static_cast<uint16_t*>(t.codes) + first * t.code_stride;
      for (int i = 0; i < n; ++i) {
        codes[i * t.code_stride] = uint16_t(index[i]);
      }
    }
  }
}

}  // namespace vqkv::VQKV_VARIANT

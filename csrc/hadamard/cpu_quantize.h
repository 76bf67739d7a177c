// The quantising half of cpu_kernel.h: centres, codes and scales of transformed tiles.
#pragma once

#include "hadamard/cpu_kernel.h"

namespace vqkv::VQKV_VARIANT {

constexpr int kSums = 32;               // partial sums of a row: the lanes of a simdgroup
constexpr int kParts = kRows / kWidth;  // vectors of a channel

/** Of [kSums, kRows] the sums of neighbours, then of neighbouring pairs and so on, per lane; the
 * result in the first. */
VQKV_INLINE void add_neighbours(float* sum) {
  for (int h = 1; h < kSums; h *= 2) {
    for (int i = 0; i < kSums; i += 2 * h) {
      for (int m = 0; m < kRows; m += kWidth) {
        float* p = sum + i * kRows + m;
        store(p, load<F>(p) + load<F>(p + h * kRows));
      }
    }
  }
}

/** y = y * scale - centre and its squared norms, of one tile. */
inline void centre_and_norm(float* y, int width, float scale, const float* centre, float* sum) {
  fill_floats(sum, kSums * kRows, 0.0f);
  for (int l = 0; l < kSums && l < width; ++l) {
    for (int m = 0; m < kParts; ++m) {
      F s{};
      for (int c = l; c < width; c += kSums) {
        float* p = y + c * kRows + m * kWidth;
        const F v = rounded(load<F>(p) * scale) - centre[c];
        store(p, v);
        s += rounded(v * v);
      }
      store(sum + l * kRows + m * kWidth, s);
    }
  }
  add_neighbours(sum);
}

struct Level {
  I index;
  F value;
};

template <int Bits>
VQKV_INLINE Level nearest_level(F u, const float* bounds, const float* levels) {
  Level r{};
  if constexpr (Bits <= 4) {
    r.value = splat<F>(levels[0]);
    for (int k = 0; k < (1 << Bits) - 1; ++k) {
      const auto above = u > splat<F>(bounds[k]);  // false for NaN
      r.index -= above;
      r.value = above ? splat<F>(levels[k + 1]) : r.value;
    }
  } else {
    for (int step = 1 << (Bits - 1); step > 0; step /= 2) {
      for (int i = 0; i < kWidth; ++i) {
        r.index[i] += bounds[r.index[i] + step - 1] < u[i] ? step : 0;
      }
    }
    for (int i = 0; i < kWidth; ++i) {
      r.value[i] = levels[r.index[i]];
    }
  }
  return r;
}

/** Indices of y * factor, <y, levels> and |levels|^2. */
template <int Bits>
void find_levels(const float* y, int width, const float* factor, const float* table, int32_t* index,
                 float* dot, float* square) {
  fill_floats(dot, kSums * kRows, 0.0f);
  fill_floats(square, kSums * kRows, 0.0f);
  for (int l = 0; l < kSums && l < width; ++l) {
    for (int m = 0; m < kParts; ++m) {
      const F f = load<F>(factor + m * kWidth);
      F d{}, s{};
      for (int c = l; c < width; c += kSums) {
        const int at = c * kRows + m * kWidth;
        const F v = load<F>(y + at);
        const Level r = nearest_level<Bits>(v * f, table, table + 255);
        __builtin_memcpy(index + at, &r.index, sizeof(I));
        d += rounded(v * r.value);
        s += rounded(r.value * r.value);
      }
      store(dot + l * kRows + m * kWidth, d);
      store(square + l * kRows + m * kWidth, s);
    }
  }
  add_neighbours(dot);
  add_neighbours(square);
}

/** The bit streams of n rows; the indices are zero from `width` to the next multiple of 32. */
template <int Bits>
void pack_rows(const int32_t* index, int width, int n, int bytes, uint8_t* out) {
  using U = Vec<kWidth>::U;
  uint32_t words[kRows * Bits];  // of 32 entries, by row
  for (int c0 = 0, at = 0; c0 < width; c0 += 32, at += 4 * Bits) {
    for (int w = 0; w < Bits; ++w) {
      for (int m = 0; m < kParts; ++m) {
        U word{};
        for (int t = 32 * w / Bits; t * Bits < 32 * (w + 1); ++t) {
          U v;
          __builtin_memcpy(&v, index + (c0 + t) * kRows + m * kWidth, sizeof(U));
          const int shift = t * Bits - 32 * w;
          word |= shift >= 0 ? v << shift : v >> -shift;
        }
        for (int i = 0; i < kWidth; ++i) {
          words[(m * kWidth + i) * Bits + w] = word[i];
        }
      }
    }
    const int size = bytes - at < 4 * Bits ? bytes - at : 4 * Bits;
    for (int i = 0; i < n; ++i) {
      __builtin_memcpy(out + int64_t(i) * bytes + at, words + i * Bits, size);
    }
  }
}

VQKV_INLINE bool finite(float x) {
  return (float_bits(x) & 0x7f800000) != 0x7f800000;
}

/** As hadamard_row_scale in metal/hadamard_quantize.h. */
inline float row_scale(int kind, float norm2, float dot, float square, float root) {
  if (!finite(norm2)) {
    return bits_to_float(0x7fc00000);
  }
  float over = norm2, under = dot;
  if (kind == HADAMARD_MSE) {
    over = dot;
    under = square;
  } else if (kind == HADAMARD_NORM) {
    over = __builtin_sqrtf(norm2);
    under = root;
  } else if (kind == HADAMARD_MATCHED) {
    over = __builtin_sqrtf(norm2);
    under = __builtin_sqrtf(square);
  }
  return norm2 > 0.0f && under > 0.0f ? over / under : 0.0f;
}

/** Codes and scales of n transformed rows. */
template <int Bits>
void encode_tile(const HadamardQuantizeTile& t, float* y, float scale, const float* centre,
                 int64_t first, int n, int32_t* index) {
  const int width = t.rows.width;
  float norm2[kSums * kRows], dot[kSums * kRows], square[kSums * kRows], factor[kRows];
  centre_and_norm(y, width, scale, centre, norm2);
  for (int i = 0; i < kRows; ++i) {
    const float f = norm2[i] > 0.0f ? t.p.root / __builtin_sqrtf(norm2[i]) : 0.0f;
    factor[i] = finite(norm2[i]) ? f : bits_to_float(0x7fc00000);
  }
  find_levels<Bits>(y, width, factor, t.table, index, dot, square);
  pack_rows<Bits>(index, width, n, t.p.bytes, t.packed + first * t.p.bytes);
  for (int i = 0; i < n; ++i) {
    const float s = row_scale(t.p.kind, norm2[i], dot[i], square[i], t.p.root);
    t.scales[first + i] = float_to_bf16(s * t.p.unit);
  }
}

/** The mean of all tiles [width, kRows] per channel as int8 steps of a bf16 unit; also as floats.
 * Scales the tiles. */
inline void block_centre(const HadamardQuantizeTile& t, float* y, int64_t tiles, int64_t stride,
                         float* centre) {
  const int width = t.rows.width;
  float most = 0.0f;
  for (int c = 0; c < width; ++c) {
    float sum[kRows];
    for (int m = 0; m < kParts; ++m) {
      F s{};
      for (int64_t g = 0; g < tiles; ++g) {
        float* p = y + g * stride + c * kRows + m * kWidth;
        const F v = rounded(load<F>(p) * t.rows.scale);
        store(p, v);
        s += v;
      }
      store(sum + m * kWidth, s);
    }
    for (int h = kRows / 2; h >= 4; h /= 2) {
      for (int i = 0; i < h; i += 4) {
        store(sum + i, load<F4>(sum + i) + load<F4>(sum + i + h));
      }
    }
    const float mean = ((sum[0] + sum[2]) + (sum[1] + sum[3])) * t.p.share;
    centre[c] = finite(mean) ? mean : 0.0f;
    const float size = centre[c] < 0.0f ? -centre[c] : centre[c];
    most = size > most ? size : most;
  }
  *t.block_scale = float_to_bf16(most / 127.0f);
  const float unit = bf16_to_float(*t.block_scale);
  for (int c = 0; c < width; ++c) {
    float q = unit > 0.0f ? centre[c] / unit : 0.0f;
    q = (q + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: to the nearest integer, ties to even
    q = q < -127.0f ? -127.0f : q > 127.0f ? 127.0f : q;
    t.block_centre[c] = int8_t(int(q));
    centre[c] = q * unit;
  }
}

template <int Bits>
void quantize_rows(const HadamardQuantizeTile& t) {
  const HadamardTile& r = t.rows;
  const int padded = (r.width + 31) / 32 * 32;
  const int64_t stride = int64_t(padded) * kRows;
  int32_t* index = reinterpret_cast<int32_t*>(r.scratch);
  float* centre = r.scratch + stride;
  float* y = centre + padded;
  fill_floats(r.scratch, stride, 0.0f);
  if (t.p.block > 0) {
    const int64_t tiles = (r.count + kRows - 1) / kRows;
    for (int64_t g = 0; g < tiles; ++g) {
      const int64_t left = r.count - g * kRows;
      load_rows(r, g * kRows, left < kRows ? int(left) : kRows, y + g * stride);
      transform(r, y + g * stride);
    }
    block_centre(t, y, tiles, stride, centre);
    for (int64_t g = 0; g < tiles; ++g) {
      const int64_t left = r.count - g * kRows;
      encode_tile<Bits>(t, y + g * stride, 1.0f, centre, g * kRows,
                        left < kRows ? int(left) : kRows, index);
    }
    return;
  }
  for (int c = 0; c < r.width; ++c) {
    centre[c] = t.centre ? float(t.centre[c]) * bf16_to_float(t.centre_scale) : 0.0f;
  }
  for (int64_t first = 0; first < r.count; first += kRows) {
    const int n = r.count - first < kRows ? int(r.count - first) : kRows;
    load_rows(r, first, n, y);
    transform(r, y);
    encode_tile<Bits>(t, y, r.scale, centre, first, n, index);
  }
}

inline void hadamard_quantize(const HadamardQuantizeTile& t) {
  switch (t.p.bits) {
    case 1:
      return quantize_rows<1>(t);
    case 2:
      return quantize_rows<2>(t);
    case 3:
      return quantize_rows<3>(t);
    case 4:
      return quantize_rows<4>(t);
    default:
      return quantize_rows<8>(t);
  }
}

}  // namespace vqkv::VQKV_VARIANT

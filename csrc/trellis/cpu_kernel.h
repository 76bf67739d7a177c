// The path of least squared error through a bitshift trellis (Viterbi). Lanes hold rows: every
// step is the same for all of them and no minimum crosses lanes. The state of a value is the 8 bits
// at bit B t of the row's stream, so its predecessors are the 2^B states that differ in their B
// lowest bits only: one minimum serves the 2^B successors of such a group. Sums are in the order of
// metal/trellis.h and never fused.
#pragma once

#include "hadamard/cpu_quantize.h"

namespace vqkv::VQKV_VARIANT {

/** How the choices of a step are packed into words of 32 bits. */
template <int B>
struct TrellisWords {
  static constexpr int groups = kTrellisStates >> B;
  static constexpr int each = B == 3 ? 8 : 32 / B;  // groups of a word
  static constexpr int words = groups / each;
};

VQKV_INLINE F squared_distance(F x, float level) {
  const F d = x - splat<F>(level);
  return rounded(d * d);
}

/** The lowest of n costs, `stride` floats apart, in the lanes; `step` times its index goes to
 * `index`. Ties, and NaN, keep the lower index. */
template <int N>
VQKV_INLINE F least_cost(const float* cost, uint32_t step, I* index) {
  F least = load<F>(cost);
  I at{};
  VQKV_UNROLL
  for (int j = 1; j < N; ++j) {
    const F c = load<F>(cost + j * kWidth);
    const auto less = c < least;
    least = less ? c : least;
    at = less ? I{} + static_cast<int32_t>(uint32_t(j) * step) : at;
  }
  *index = at;
  return least;
}

/**
 * The states of lowest total cost of kWidth rows, and the way there: word w of step t, at
 * choices[t * words + w], has B bits for each of its groups.
 *
 * values: [width, kRows], cost: [2, kTrellisStates, kWidth], choices: [width, words, kRows].
 */
template <int B>
void trellis_forward(const float* values, int width, const float* table, float* cost,
                     int32_t* choices, int32_t* last) {
  using W = TrellisWords<B>;
  float *from = cost, *to = cost + kTrellisStates * kWidth;
  F x = load<F>(values);
  for (int s = 0; s < kTrellisStates; ++s) {
    store(from + s * kWidth, squared_distance(x, table[s]));
  }
  for (int t = 1; t < width; ++t) {
    x = load<F>(values + t * kRows);
    for (int w = 0; w < W::words; ++w) {
      I word{};
      for (int k = 0; k < W::each; ++k) {
        const int group = w * W::each + k;
        I choice;
        const F least = least_cost<1 << B>(from + (group << B) * kWidth, 1u << (B * k), &choice);
        word |= choice;
        VQKV_UNROLL
        for (int n = 0; n < 1 << B; ++n) {
          const int s = group + n * W::groups;
          store(to + s * kWidth, least + squared_distance(x, table[s]));
        }
      }
      __builtin_memcpy(choices + (t * W::words + w) * kRows, &word, sizeof(I));
    }
    float* swap = from;
    from = to;
    to = swap;
  }
  F least = load<F>(from);
  I at{};
  for (int s = 1; s < kTrellisStates; ++s) {
    const F c = load<F>(from + s * kWidth);
    const auto less = c < least;
    least = less ? c : least;
    at = less ? I{} + s : at;
  }
  __builtin_memcpy(last, &at, sizeof(I));
}

/** The states on the way to `state`: [width, kRows]. */
template <int B>
void trellis_path(const int32_t* choices, int width, const int32_t* last, uint8_t* path) {
  using W = TrellisWords<B>;
  uint32_t state[kRows];
  __builtin_memcpy(state, last, sizeof(state));
  for (int t = width - 1; t >= 0; --t) {
    for (int i = 0; i < kRows; ++i) {
      path[t * kRows + i] = uint8_t(state[i]);
    }
    for (int i = 0; t > 0 && i < kRows; ++i) {
      const uint32_t group = state[i] % W::groups;
      const uint32_t word = uint32_t(choices[(t * W::words + group / W::each) * kRows + i]);
      state[i] = group << B | (word >> (B * (group % W::each))) % (1u << B);
    }
  }
}

/** sum[i] + sum[i + 16], then 8 and so on, per lane; the result in the first of [kSums, kRows]. */
VQKV_INLINE void fold_sums(float* sum) {
  for (int h = kSums / 2; h > 0; h /= 2) {
    for (int i = 0; i < h * kRows; i += kWidth) {
      store(sum + i, load<F>(sum + i) + load<F>(sum + i + h * kRows));
    }
  }
}

/** sum[lane of a simdgroup] of the products of two tiles [width, kRows], folded. */
inline void tile_dot(const float* a, const float* b, int width, float* sum) {
  fill_floats(sum, kSums * kRows, 0.0f);
  for (int l = 0; l < kSums && l < width; ++l) {
    for (int m = 0; m < kRows; m += kWidth) {
      F s{};
      for (int c = l; c < width; c += kSums) {
        s += rounded(load<F>(a + c * kRows + m) * load<F>(b + c * kRows + m));
      }
      store(sum + l * kRows + m, s);
    }
  }
  fold_sums(sum);
}

/** The bit stream of row i of a path. */
template <int B>
void trellis_bytes(const uint8_t* path, int width, int i, int bytes, uint8_t* out) {
  for (int k = 0; k < bytes; ++k) {
    const int t = 8 * k / B < width - 1 ? 8 * k / B : width - 1;
    uint32_t bits = path[t * kRows + i];
    if (t + 1 < width) {
      bits |= uint32_t(path[(t + 1) * kRows + i]) >> (8 - B) << 8;
    }
    out[k] = uint8_t(bits >> (8 * k - B * t));
  }
}

template <int B>
void trellis_rows(const TrellisTile& t) {
  const int width = t.p.width;
  float* y = t.scratch;
  float* values = y + width * kRows;
  float* cost = values + width * kRows;
  int32_t* choices = reinterpret_cast<int32_t*>(cost + 2 * kTrellisStates * kRows);
  uint8_t* path = reinterpret_cast<uint8_t*>(choices + width * TrellisWords<B>::words * kRows);
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < width; ++c) {
      y[c * kRows + i] = i < t.count ? t.x[int64_t(i) * width + c] : 0.0f;
    }
  }
  float norm2[kSums * kRows], dot[kSums * kRows], square[kSums * kRows], factor[kRows];
  tile_dot(y, y, width, norm2);
  for (int i = 0; i < kRows; ++i) {
    const float f = norm2[i] > 0.0f ? t.p.root / __builtin_sqrtf(norm2[i]) : 0.0f;
    factor[i] = finite(norm2[i]) ? f : bits_to_float(0x7fc00000);
  }
  int32_t last[kRows];
  for (int m = 0; m < kRows; m += kWidth) {
    const F f = load<F>(factor + m);
    for (int c = 0; c < width; ++c) {
      store(values + c * kRows + m, load<F>(y + c * kRows + m) * f);
    }
    trellis_forward<B>(values + m, width, t.table, cost, choices + m, last + m);
  }
  trellis_path<B>(choices, width, last, path);
  float* levels = values;
  for (int c = 0; c < width * kRows; ++c) {
    levels[c] = t.table[path[c]];
  }
  tile_dot(y, levels, width, dot);
  tile_dot(levels, levels, width, square);
  for (int i = 0; i < t.count; ++i) {
    trellis_bytes<B>(path, width, i, t.p.bytes, t.codes + int64_t(i) * t.p.bytes);
    t.scales[i] = float_to_bf16(row_scale(t.p.kind, norm2[i], dot[i], square[i], t.p.root));
  }
}

inline void trellis_encode(const TrellisTile& t) {
  switch (t.p.bits) {
    case 1:
      return trellis_rows<1>(t);
    case 2:
      return trellis_rows<2>(t);
    case 3:
      return trellis_rows<3>(t);
    default:
      return trellis_rows<4>(t);
  }
}

}  // namespace vqkv::VQKV_VARIANT

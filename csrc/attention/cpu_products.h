// Register-blocked products between query rows (lanes) and decoded tokens, and the softmax.
#pragma once

#include "cpu/vector.h"

namespace vqkv::VQKV_VARIANT {

/** R query rows as N vectors of the widest type that fits. */
template <int R>
struct Rows {
  static constexpr int lanes = R < kWidth ? R : kWidth;
  static constexpr int N = R / lanes;
  using V = typename Vec<lanes>::F;
};

template <int R>
VQKV_INLINE void scale_row(float* p, float scale) {
  using V = typename Rows<R>::V;
  for (int i = 0; i < R; i += Rows<R>::lanes) {
    store(p + i, load<V>(p + i) * scale);
  }
}

template <int R>
VQKV_INLINE void add_row(float* p, const float* x) {
  using V = typename Rows<R>::V;
  for (int i = 0; i < R; i += Rows<R>::lanes) {
    store(p + i, load<V>(p + i) + load<V>(x + i));
  }
}

/** Partial sums are added at the end: shorter chains of additions round less. */
template <typename V>
VQKV_INLINE void add_to(float* p, V sum) {
  store(p, load<V>(p) + sum);
}

constexpr int kSumDims = 32;  // products of one partial sum of a score

// ---- scores from a table of products ----

/** lut[entry][row][R]: every table row times its part of every query row. */
template <int R>
void build_lut(const Tokens& k, const float* queries, float* lut) {
  using V = typename Rows<R>::V;
  constexpr int N = Rows<R>::N, lanes = Rows<R>::lanes;
  const CodeParams& c = *k.code;
  for (int e = 0; e < c.entries; ++e) {
    const float* q = queries + int64_t(e) * c.dims * R;
    const float* row = k.table + (c.per_group ? int64_t(e) * c.rows * c.dims : 0);
    for (int i = 0; i < c.rows; ++i, row += c.dims, lut += R) {
      V sum[N]{};
      for (int j = 0; j < c.dims; ++j) {
        for (int n = 0; n < N; ++n) {
          sum[n] += load<V>(q + j * R + n * lanes) * row[j];
        }
      }
      for (int n = 0; n < N; ++n) {
        store(lut + n * lanes, sum[n]);
      }
    }
  }
}

template <int R>
void add_lut_scores(const float* lut, int rows, const uint8_t* index, int64_t index_stride,
                    int entries, int tokens, float* scores) {
  using V = typename Rows<R>::V;
  constexpr int N = Rows<R>::N, lanes = Rows<R>::lanes;
  for (int t = 0; t < tokens; ++t, index += index_stride, scores += R) {
    V sum[N]{};
    const float* products = lut;
    auto add = [&](int e) __attribute__((always_inline)) {
      for (int n = 0; n < N; ++n) {
        sum[n] += load<V>(products + int(index[e]) * R + n * lanes);
      }
      products += int64_t(rows) * R;
    };
    int e = 0;
    for (; e + 4 <= entries; e += 4) {
      add(e);
      add(e + 1);
      add(e + 2);
      add(e + 3);
    }
    for (; e < entries; ++e) {
      add(e);
    }
    for (int n = 0; n < N; ++n) {
      add_to(scores + n * lanes, sum[n]);
    }
  }
}

// ---- scores and outputs from decoded tokens ----

template <int R, int Block>
VQKV_INLINE void score_block(const float* tokens, int64_t stride, int dims, const float* q,
                             float* scores) {
  using V = typename Rows<R>::V;
  constexpr int N = Rows<R>::N, lanes = Rows<R>::lanes;
  V sum[Block][N]{};
  for (int d = 0; d < dims; ++d) {
    V row[N];
    VQKV_UNROLL
    for (int n = 0; n < N; ++n) {
      row[n] = load<V>(q + int64_t(d) * R + n * lanes);
    }
    VQKV_UNROLL
    for (int b = 0; b < Block; ++b) {
      const float x = tokens[b * stride + d];
      VQKV_UNROLL
      for (int n = 0; n < N; ++n) {
        sum[b][n] += row[n] * x;
      }
    }
  }
  VQKV_UNROLL
  for (int b = 0; b < Block; ++b) {
    VQKV_UNROLL
    for (int n = 0; n < N; ++n) {
      add_to(scores + b * R + n * lanes, sum[b][n]);
    }
  }
}

/** scores[token][R] += tokens[token][dims] . q[dims][R] */
template <int R>
void add_scores(const float* tokens, int64_t stride, int dims, const float* q, int count,
                float* scores) {
  constexpr int block = 8 / Rows<R>::N;
  for (int d = 0; d < dims; d += kSumDims, tokens += kSumDims, q += kSumDims * R) {
    const int m = dims - d < kSumDims ? dims - d : kSumDims;
    int t = 0;
    for (; t + block <= count; t += block) {
      score_block<R, block>(tokens + t * stride, stride, m, q, scores + int64_t(t) * R);
    }
    for (; t < count; ++t) {
      score_block<R, 1>(tokens + t * stride, stride, m, q, scores + int64_t(t) * R);
    }
  }
}

template <int R, int Block, int N>
VQKV_INLINE void value_block(const float* weights, const float* tokens, int64_t stride, int count,
                             float* out, int64_t out_stride) {
  F sum[Block][N]{};
  for (int t = 0; t < count; ++t) {
    F row[N];
    VQKV_UNROLL
    for (int n = 0; n < N; ++n) {
      row[n] = load<F>(tokens + t * stride + n * kWidth);
    }
    VQKV_UNROLL
    for (int b = 0; b < Block; ++b) {
      const float w = weights[int64_t(t) * R + b];
      VQKV_UNROLL
      for (int n = 0; n < N; ++n) {
        sum[b][n] += row[n] * w;
      }
    }
  }
  VQKV_UNROLL
  for (int b = 0; b < Block; ++b) {
    VQKV_UNROLL
    for (int n = 0; n < N; ++n) {
      add_to(out + b * out_stride + n * kWidth, sum[b][n]);
    }
  }
}

template <int R, int Block>
void value_rows(const float* weights, const float* tokens, int stride, int count, float* out,
                int64_t out_stride) {
  constexpr int N = kWidth == 16 ? 4 : 2;
  int d = 0;
  for (; d + N * kWidth <= stride; d += N * kWidth) {
    value_block<R, Block, N>(weights, tokens + d, stride, count, out + d, out_stride);
  }
  for (; d + 2 * kWidth <= stride; d += 2 * kWidth) {
    value_block<R, Block, 2>(weights, tokens + d, stride, count, out + d, out_stride);
  }
  for (; d < stride; d += kWidth) {
    value_block<R, Block, 1>(weights, tokens + d, stride, count, out + d, out_stride);
  }
}

/** out[row][stride] += weights[token][R]^T . tokens[token][stride], for the first `rows` rows. */
template <int R>
void add_values(const float* weights, int rows, const float* tokens, int stride, int count,
                float* out, int64_t out_stride) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    value_rows<R, 4>(weights + r, tokens, stride, count, out + r * out_stride, out_stride);
  }
  for (; r + 2 <= rows; r += 2) {
    value_rows<R, 2>(weights + r, tokens, stride, count, out + r * out_stride, out_stride);
  }
  for (; r < rows; ++r) {
    value_rows<R, 1>(weights + r, tokens, stride, count, out + r * out_stride, out_stride);
  }
}

// ---- softmax ----

/**
 * scores[token][R] (powers of two) -> probabilities relative to the updated running maximum.
 * `shrink` is what earlier sums and outputs are to be multiplied by; `sum` is updated here. Rows
 * that saw no token keep max = -inf, sum = 0. Writes up to a whole vector behind the last token.
 */
template <int R>
void softmax(float* scores, int tokens, float* max, float* sum, float* shrink) {
  constexpr int P = R > kWidth ? R : kWidth, N = P / kWidth;  // lane l of P belongs to row l % R
  const float infinity = __builtin_inff();
  const int64_t size = int64_t(tokens) * R, padded = (size + P - 1) / P * P;
  fill_floats(scores + size, padded - size, -infinity);
  F top[N];
  for (int n = 0; n < N; ++n) {
    top[n] = splat<F>(-infinity);
  }
  for (int64_t i = 0; i < padded; i += P) {
    for (int n = 0; n < N; ++n) {
      F x = load<F>(scores + i + n * kWidth);
      top[n] = x > top[n] ? x : top[n];
    }
  }
  float lane[P], shift[P], step[P];
  __builtin_memcpy(lane, top, sizeof(lane));
  for (int r = 0; r < R; ++r) {
    float m = max[r];
    for (int l = r; l < P; l += R) {
      m = lane[l] > m ? lane[l] : m;
    }
    for (int l = r; l < P; l += R) {
      shift[l] = m == -infinity ? 0.0f : m;
      step[l] = max[r] - shift[l];
    }
    max[r] = m;
  }
  F total[N]{}, by[N];
  for (int n = 0; n < N; ++n) {
    by[n] = load<F>(shift + n * kWidth);
  }
  for (int64_t i = 0; i < padded; i += P) {
    for (int n = 0; n < N; ++n) {
      F p = exp2_nonpositive(load<F>(scores + i + n * kWidth) - by[n]);
      store(scores + i + n * kWidth, p);
      total[n] += p;
    }
  }
  __builtin_memcpy(lane, total, sizeof(lane));
  for (int n = 0; n < N; ++n) {
    store(step + n * kWidth, exp2_nonpositive(load<F>(step + n * kWidth)));
  }
  for (int r = 0; r < R; ++r) {
    float added = 0.0f;
    for (int l = r; l < P; l += R) {
      added += lane[l];
    }
    shrink[r] = step[r];
    sum[r] = sum[r] * shrink[r] + added;
  }
}

}  // namespace vqkv::VQKV_VARIANT

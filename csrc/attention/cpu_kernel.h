// Attention of a tile of query rows over a run of tokens, with an online softmax.
//
// Query rows are the lanes of scores[token][row]: the heads of a GQA group share every decoded
// token, and softmax needs no reduction across lanes. With few rows, key scores come from a table
// of (query row . table row) products, one load per entry and token for all rows; otherwise keys
// are decoded in small pieces. Values are always decoded, a chunk of channels at a time so that
// the part of the table in use stays cached. Scales and centres act on scores and probabilities.
#pragma once

#include "attention/cpu_products.h"
#include "attention/cpu_tokens.h"

namespace vqkv::VQKV_VARIANT {

constexpr float kHidden = -1e30f;  // an additive mask of this or less hides a token
constexpr float kLog2E = 1.44269504088896340736f;

/** Scratch of one call, carved from AttentionTile::scratch. */
struct Scratch {
  float* scores;   // [groups][span + padding][lanes]
  float* centres;  // the same for the centres of the span's blocks
  float* tokens;   // decoded tokens
  void* index;     // unpacked indices
  float* lut;

  explicit Scratch(const AttentionTile& a) {
    float* p = a.scratch;
    scores = p;
    p += kRowGroups * kGroupFloats;
    centres = p;
    p += kRowGroups * kGroupFloats;
    index = p;
    p += kSubTile * kChunkDims / 2;
    lut = p;
    p += kLutFloats;
    tokens = p;
  }

  static constexpr int64_t kGroupFloats = kSpanFloats + 4 * kMaxLanes;
};

template <int R>
struct Attend {
  // Products of 16 rows would not stay in the caches; computing them again is faster.
  static constexpr bool kMayLut = R <= 8;

  const AttentionTile& a;
  const Scratch s;
  const int groups;
  const bool use_lut;

  explicit Attend(const AttentionTile& tile)
      : a(tile), s(tile), groups((tile.rows + R - 1) / R), use_lut(lut_pays(tile)) {}

  static bool lut_pays(const AttentionTile& a) {
    if (!a.coded || !kMayLut) {
      return false;
    }
    const CodeParams& c = *a.keys.code;
    return c.rows <= 256 && int64_t(c.rows) * c.entries * R <= kLutFloats &&
           a.last - a.first >= c.rows;
  }

  void run() {
    if constexpr (kMayLut) {
      if (use_lut) {
        build_lut<R>(a.keys, a.queries, s.lut);
      }
    }
    constexpr int span = kSpanFloats / R;
    for (int64_t t = a.first; t < a.last; t += span) {
      const int n = a.last - t < span ? int(a.last - t) : span;
      score(t, n);
      weigh(t, n);
    }
  }

  bool scaled(const Tokens& side) const { return a.coded && side.code->scaled; }
  bool centred(const Tokens& side) const { return a.coded && side.code->centred; }
  Kind kind() const { return a.coded ? Kind::coded : Kind::tail; }
  float* scores(int g) const { return s.scores + g * Scratch::kGroupFloats; }
  float* centres(int g) const { return s.centres + g * Scratch::kGroupFloats; }

  // ---- scores and softmax ----

  void key_products(const Tokens& keys, const float* queries, Kind kind, int64_t first, int n,
                    float* to) {
    for (int g = 0; g < groups; ++g) {
      fill_floats(to + g * Scratch::kGroupFloats, int64_t(n) * R, 0.0f);
    }
    const int width = keys.width, step = chunk_dims(keys, kind);
    for (int d = 0; d < width; d += step) {
      const int dims = width - d < step ? width - d : step;
      const int64_t stride = (dims + kWidth - 1) / kWidth * kWidth;
      for (int t = 0; t < n; t += kSubTile) {
        const int m = n - t < kSubTile ? n - t : kSubTile;
        read_tokens(keys, kind, first + t, m, d, dims, s.index, s.tokens, stride);
        for (int g = 0; g < groups; ++g) {
          add_scores<R>(s.tokens, stride, dims, queries + (int64_t(g) * width + d) * R, m,
                        to + g * Scratch::kGroupFloats + int64_t(t) * R);
        }
      }
    }
  }

  void lut_products(int64_t first, int n) {
    const CodeParams& c = *a.keys.code;
    fill_floats(s.scores, int64_t(n) * R, 0.0f);
    int step = kLineFloats / (c.rows * R);
    step = step < 1 ? 1 : step > kChunkDims ? kChunkDims : step;
    for (int e = 0; e < c.entries; e += step) {
      const int count = c.entries - e < step ? c.entries - e : step;
      for (int t = 0; t < n; t += kSubTile) {
        const int m = n - t < kSubTile ? n - t : kSubTile;
        int64_t stride;
        auto* index =
            byte_indices(a.keys, first + t, m, e, count, static_cast<uint8_t*>(s.index), &stride);
        add_lut_scores<R>(s.lut + int64_t(e) * c.rows * R, c.rows, index, stride, count, m,
                          s.scores + int64_t(t) * R);
      }
    }
  }

  void products(int64_t first, int n) {
    if constexpr (kMayLut) {
      if (use_lut) {
        lut_products(first, n);
        return;
      }
    }
    key_products(a.keys, a.queries, kind(), first, n, s.scores);
  }

  void score(int64_t first, int n) {
    products(first, n);
    const Tokens& k = a.keys;
    const int64_t block = centred(k) ? first / k.block : 0;
    if (centred(k)) {
      key_products(k, a.queries, Kind::centres, block, int((first + n - 1) / k.block - block + 1),
                   s.centres);
    }
    for (int g = 0; g < groups; ++g) {
      float* to = scores(g);
      for (int t = 0; scaled(k) && t < n; ++t) {
        scale_row<R>(to + int64_t(t) * R, bf16_to_float(k.scales[first + t]));
      }
      for (int t = 0; centred(k) && t < n; ++t) {
        add_row<R>(to + int64_t(t) * R, centres(g) + ((first + t) / k.block - block) * R);
      }
    }
    if (a.coded && a.pair.width > 0) {
      add_pair(first, n);
    }
    for (int g = 0; g < groups; ++g) {
      hide(g, first, n);
      if (a.mask != nullptr) {
        mask(g, first, n);
      }
    }
  }

  void add_pair(int64_t first, int n) {
    key_products(a.pair, a.pair_queries, Kind::coded, first, n, s.centres);
    for (int g = 0; g < groups; ++g) {
      for (int t = 0; t < n; ++t) {
        float* products = centres(g) + int64_t(t) * R;
        if (scaled(a.pair)) {
          scale_row<R>(products, bf16_to_float(a.pair.scales[first + t]));
        }
        add_row<R>(scores(g) + int64_t(t) * R, products);
      }
    }
  }

  // Rows of one tile see nearly the same tokens, so most spans need nothing here.
  void hide(int g, int64_t first, int n) {
    for (int r = 0; r < R && g * R + r < a.rows; ++r) {
      const int64_t begin = a.begin[g * R + r] - first, end = a.end[g * R + r] - first;
      float* to = scores(g) + r;
      for (int64_t t = 0; t < begin && t < n; ++t) {
        to[t * R] = -__builtin_inff();
      }
      for (int64_t t = end > 0 ? end : 0; t < n; ++t) {
        to[t * R] = -__builtin_inff();
      }
    }
  }

  void mask(int g, int64_t first, int n) {
    for (int r = 0; r < R && g * R + r < a.rows; ++r) {
      const MaskRow& m = a.mask[g * R + r];
      float* to = scores(g) + r;
      for (int64_t t = m.columns - first < n ? (m.columns > first ? m.columns - first : 0) : n;
           t < n; ++t) {
        to[t * R] = -__builtin_inff();
      }
      const int64_t known = m.columns - first < n ? m.columns - first : n;
      if (m.type == MASK_BOOL) {
        auto* p = static_cast<const uint8_t*>(m.at);
        for (int64_t t = 0; t < known; ++t) {
          to[t * R] = p[(first + t) * m.stride] ? to[t * R] : -__builtin_inff();
        }
        continue;
      }
      const Real type = m.type == MASK_FLOAT  ? Real::f32
                        : m.type == MASK_HALF ? Real::f16
                                              : Real::bf16;
      float add[kSubTile];
      for (int64_t t = 0; t < known; t += kSubTile) {
        const int count = known - t < kSubTile ? int(known - t) : kSubTile;
        if (m.stride) {
          to_float(m.at, type, first + t, count, add);
        } else {
          to_float(m.at, type, 0, 1, add);
          for (int i = 1; i < count; ++i) {
            add[i] = add[0];
          }
        }
        for (int i = 0; i < count; ++i) {
          float& score = to[(t + i) * R];
          score = add[i] > kHidden ? score + add[i] * kLog2E : -__builtin_inff();
        }
      }
    }
  }

  // ---- values ----

  void value_products(Kind kind, int64_t first, int n, const float* weights) {
    const int width = a.values.width, step = chunk_dims(a.values, kind);
    for (int d = 0; d < width; d += step) {
      const int dims = width - d < step ? width - d : step;
      const int64_t stride = (dims + kWidth - 1) / kWidth * kWidth;
      for (int t = 0; t < n; t += kSubTile) {
        const int m = n - t < kSubTile ? n - t : kSubTile;
        read_tokens(a.values, kind, first + t, m, d, dims, s.index, s.tokens, stride);
        for (int g = 0; g < groups; ++g) {
          const int rows = a.rows - g * R < R ? a.rows - g * R : R;
          add_values<R>(weights + g * Scratch::kGroupFloats + int64_t(t) * R, rows, s.tokens,
                        int(stride), m, a.out + g * R * out_stride(width) + d, out_stride(width));
        }
      }
    }
  }

  // Turns scores into probabilities and adds the values they weigh.
  void weigh(int64_t first, int n) {
    const Tokens& v = a.values;
    const int64_t block = centred(v) ? first / v.block : 0;
    const int blocks = centred(v) ? int((first + n - 1) / v.block - block + 1) : 0;
    for (int g = 0; g < groups; ++g) {
      float shrink[R];
      softmax<R>(scores(g), n, a.max + g * R, a.sum + g * R, shrink);
      for (int r = 0; r < R && g * R + r < a.rows; ++r) {
        float* out = a.out + (g * R + r) * out_stride(v.width);
        for (int d = 0; shrink[r] != 1.0f && d < v.width; ++d) {
          out[d] *= shrink[r];
        }
      }
      if (centred(v)) {
        fill_floats(centres(g), int64_t(blocks) * R, 0.0f);
        for (int t = 0; t < n; ++t) {
          add_row<R>(centres(g) + ((first + t) / v.block - block) * R, scores(g) + int64_t(t) * R);
        }
      }
      for (int t = 0; scaled(v) && t < n; ++t) {
        scale_row<R>(scores(g) + int64_t(t) * R, bf16_to_float(v.scales[first + t]));
      }
    }
    value_products(kind(), first, n, s.scores);
    if (centred(v)) {
      value_products(Kind::centres, block, blocks, s.centres);
    }
  }
};

inline void attention(const AttentionTile& a) {
  if (a.lanes == 4) {
    Attend<4>(a).run();
  } else if (a.lanes == 8) {
    Attend<8>(a).run();
  } else {
    Attend<16>(a).run();
  }
}

}  // namespace vqkv::VQKV_VARIANT

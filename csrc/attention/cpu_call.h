// What the CPU kernel of attention reads and writes: raw pointers of a call, and which tokens a
// query row sees.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/primitive.h"
#include "cpu/task.h"

namespace vqkv {

constexpr int kMaxRows = kRowGroups * kMaxLanes;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr int64_t kSplitTokens = 512;  // fewer would not repay a split's tables and merge

/** Raw pointers of a call; the arrays outlive the queued task. */
struct Call {
  AttentionParams p;
  const char* in[kAttentionInputs];
  int64_t code_bytes[kAttentionInputs];
  mx::Dtype dtype;
  char* out[2];
};

/** What one query row sees: body tokens [0, body), tail slots [0, sinks) and [begin, end). */
struct Visible {
  int body, sinks, begin, end;
};

inline Visible visible(const AttentionParams& p, const int32_t* layout, int query) {
  const int64_t length = layout[0], coded = layout[1], sinks = p.sink_tokens;
  const int64_t start = std::max<int64_t>(layout[2], sinks);
  const int64_t own = p.causal || p.mask ? length - p.queries + query + 1 : length;
  const int64_t seen = p.causal ? own : length;
  const int64_t whole = std::max<int64_t>(0, own - sinks - p.window) / p.block * p.block;
  const int64_t boundary = sinks + std::min(coded, std::max(start - sinks, whole));
  auto clamp = [](int64_t x, int64_t low, int high) {
    return static_cast<int>(std::min<int64_t>(std::max(x, low), high));
  };
  Visible v;
  v.body = clamp(std::min(boundary, seen) - sinks, 0, p.body);
  v.sinks = clamp(std::min(sinks, seen), 0, p.tail);
  v.begin = clamp(boundary - start + sinks, std::min<int64_t>(sinks, p.tail), p.tail);
  v.end = clamp(seen - start + sinks, v.begin, p.tail);
  return v;
}

inline int channels(const CodeParams& c) {
  return c.entries * c.dims;
}

/** Tail keys or values of one kv head. */
inline Tokens tail_of(const Call& c, int64_t row, int tail) {
  Tokens t{};
  t.width = tail == kKeyTail ? c.p.key_dim : c.p.value_dim;
  t.type = real_type(c.dtype);
  t.tail = c.in[tail] + row * c.p.tail * t.width * c.dtype.size();
  return t;
}

/** Coded keys or values of one kv head. `codes` is the first of the code's inputs. */
inline Tokens body_of(const Call& c, int64_t row, const CodeParams& code, int codes) {
  const auto& p = c.p;
  const int64_t head = row % p.kv_heads, blocks = (p.body + p.block - 1) / p.block;
  Tokens t{};
  t.width = channels(code);
  t.code = &code;
  t.codes = reinterpret_cast<const uint8_t*>(c.in[codes]) + row * p.body * code.bytes;
  t.codes_end = reinterpret_cast<const uint8_t*>(c.in[codes]) + c.code_bytes[codes];
  t.table = reinterpret_cast<const float*>(c.in[codes + 1]);
  if (code.per_head) {
    t.table += head * (code.per_group ? code.entries : 1) * code.rows * code.dims;
  }
  t.scales = reinterpret_cast<const uint16_t*>(c.in[codes + 2]) + row * p.body;
  if (code.centred) {
    t.centres = reinterpret_cast<const int8_t*>(c.in[codes + 3]) + row * blocks * t.width;
    t.centre_scales = reinterpret_cast<const uint16_t*>(c.in[codes + 4]) + row * blocks;
  }
  t.block = p.block;
  return t;
}

/** Running softmax of the rows of a tile over one part of the tokens, in floats of the caller. */
struct Partial {
  float *max, *sum, *out;

  static int64_t floats(int rows, int width) { return 2 * kMaxRows + rows * out_stride(width); }

  Partial(float* p) : max(p), sum(p + kMaxRows), out(p + 2 * kMaxRows) {}

  void clear(int rows, int width) {
    std::fill_n(max, kMaxRows, -std::numeric_limits<float>::infinity());
    std::fill_n(sum, kMaxRows, 0.0f);
    std::fill_n(out, rows * out_stride(width), 0.0f);
  }
};

}  // namespace vqkv

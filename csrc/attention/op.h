#pragma once

#include <array>
#include <memory>
#include <optional>
#include <variant>

#include "common.h"
#include "metal_params.h"

namespace vqkv {

/** The coded tokens of keys or values; see packed.CodedBody. */
struct Coded {
  mx::array codes;                         // [B, Hkv, S, bytes] uint8
  mx::array table;                         // [1 or Hkv, 1 or entries, 2^window, dims]
  int stride;                              // bits between entries
  std::optional<mx::array> scales;         // [B, Hkv, S] bfloat16
  std::optional<mx::array> centres;        // [B, Hkv, S / block, D] int8
  std::optional<mx::array> centre_scales;  // [B, Hkv, S / block] bfloat16
  std::shared_ptr<Coded> pair;             // keys: a second code of the same tokens, or null
};

/** Tokens of each row: an array [B, 3] int32, or three numbers for all rows; see packed.Layout. */
using Rows = std::variant<mx::array, std::array<int, 3>>;

/** Which logical position lives where; see packed.Layout. */
struct Span {
  int sink_tokens;
  int window;
  int block;
};

/** What an attention call may do beside softmax over its tokens; see ops.attention. */
struct AttentionOptions {
  float scale;
  bool causal = false;
  bool separate = false;                    // parts from codes and tail as outputs of their own
  std::optional<mx::array> mask;            // broadcastable to [B, Hq, L, N], boolean or additive
  std::optional<mx::array> sinks;           // [Hq]
  std::optional<mx::array> key_diagonal;    // [1 or Hkv, Dk]: q goes to the codes by it and H
  std::optional<mx::array> value_diagonal;  // [1 or Hkv, Dv]
};

/**
 * Attention of q over coded and fp16 tokens; see ops.attention. `q_code` is q in the basis of the
 * key codes, where no key_diagonal says how to get there; without both, q is. Returns {out} or,
 * with `separate`, {part from codes, part from the tail} in float32.
 */
std::vector<mx::array> attention(const mx::array& q, const std::optional<mx::array>& q_code,
                                 const Rows& rows, const mx::array& k_tail, const mx::array& v_tail,
                                 const Coded& keys, const Coded& values, const Span& span,
                                 const AttentionOptions& options, mx::StreamOrDevice s = {});

/** What calls over the same codes have in common; see ops.attention. */
struct AttentionPlan {
  Coded keys, values;
  Span span;
  std::optional<mx::array> key_diagonal, value_diagonal;

  mx::array operator()(const mx::array& q, const Rows& rows, const mx::array& k_tail,
                       const mx::array& v_tail, float scale, bool causal) const;
};

}  // namespace vqkv

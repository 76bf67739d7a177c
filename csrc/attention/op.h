#pragma once

#include <memory>
#include <optional>

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

/** Which logical position lives where; see packed.Layout. */
struct Span {
  int sink_tokens;
  int window;
  int block;
};

/**
 * Attention of q over coded and fp16 tokens; see ops.attention. `q_code` is q in the basis of the
 * key codes. Returns {out} or, with `separate`, {part from codes, part from the tail} in float32.
 */
std::vector<mx::array> attention(const mx::array& q, const mx::array& q_code,
                                 const mx::array& layout, const mx::array& k_tail,
                                 const mx::array& v_tail, const Coded& keys, const Coded& values,
                                 const Span& span, float scale, bool causal, bool separate,
                                 mx::StreamOrDevice s = {});

}  // namespace vqkv

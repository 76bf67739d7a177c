#pragma once

#include <array>
#include <optional>

#include "launch.h"
#include "metal_params.h"
#include "primitive_base.h"
#include "reference.h"

namespace vqkv {

/** What an attention call takes. Queries and tails may have any strides. */
enum AttentionInput {
  kQuery,      // [B, Hq, L, Dk]
  kQueryCode,  // [B, Hq, L, channels of the key codes] float32; with a key diagonal not used
  kLayout,     // [B, 3] int32: length, coded tokens, position of the first recent tail token
  kKeyTail,    // [B, Hkv, T, Dk]
  kValueTail,  // [B, Hkv, T, Dv]
  kKeyCodes,
  kKeyTable,  // float32
  kKeyScales,
  kKeyCentres,
  kKeyCentreScales,
  kPairCodes,
  kPairTable,
  kPairScales,
  kValueCodes,
  kValueTable,
  kValueScales,
  kValueCentres,
  kValueCentreScales,
  kMask,           // [1 or B, 1 or Hq, 1 or L, 1 or N]
  kSinks,          // [Hq] float32
  kKeyDiagonal,    // [1 or Hkv, Dk] float32
  kValueDiagonal,  // [1 or Hkv, Dv] float32
  kAttentionInputs,
};

/** What an attention call fixes besides its arrays. */
struct AttentionSpec {
  float scale;
  int sink_tokens;
  int window;
  int block;
  int key_stride;
  int pair_stride;  // 0: no second key code
  int value_stride;
  bool causal;
  bool separate;
  std::optional<std::array<int, 3>> counts;  // the layout of all rows, which then is no input
  uint32_t given;  // bit i: AttentionInput i is an input of the primitive, in their order

  bool has(int input) const { return given >> input & 1; }
  bool operator==(const AttentionSpec&) const = default;
};

class Attention : public mx::Primitive {
 public:
  Attention(mx::Stream s, AttentionSpec spec) : mx::Primitive(s), spec_(spec) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive& other) const override;
  const char* name() const override { return "Attention"; }

 private:
  Scalars scalars() const;
  ArrayFunction plain(const std::vector<mx::array>& primals);

  AttentionSpec spec_;
};

/** All AttentionInputs of a call; the query stands for those that are not given. */
std::vector<mx::array> all_inputs(const std::vector<mx::array>& given, const AttentionSpec& spec);

/** Those that are given, of all. */
std::vector<mx::array> given_inputs(const std::vector<mx::array>& all, const AttentionSpec& spec);

/** Parameters of a call over all inputs, without the slices of the grid. */
AttentionParams attention_params(const std::vector<mx::array>& in, const AttentionSpec& spec);

/** Launches over all inputs, and the temporaries they share; `out` has its data already. */
std::array<Launch, 2> attention_launch(const std::vector<mx::array>& in,
                                       const std::vector<mx::array>& out, AttentionParams p,
                                       Temporaries& temporaries);

/** Native kernel; queues on the CPU stream. */
void attention_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out,
                   const AttentionParams& p, const mx::Stream& s);

}  // namespace vqkv

#pragma once

#include "launch.h"
#include "primitive_base.h"
#include "trellis/op.h"

namespace vqkv {

/** {x, table} (both float32) -> {codes, scales}. */
class TrellisEncode : public mx::Primitive {
 public:
  TrellisEncode(mx::Stream s, const TrellisCode& code) : mx::Primitive(s), code_(code) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive& other) const override {
    return code_ == static_cast<const TrellisEncode&>(other).code_;
  }
  const char* name() const override { return "TrellisEncode"; }

 private:
  TrellisCode code_;
};

/** The launch; output arrays have their data already. */
Launch trellis_encode_launch(const std::vector<mx::array>& in, const std::vector<mx::array>& out,
                             const TrellisCode& code);

/** Native kernel; queues on the CPU stream. */
void trellis_encode_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out,
                        const TrellisCode& code, const mx::Stream& s);

}  // namespace vqkv

#pragma once

#include "hadamard/op.h"
#include "launch.h"
#include "primitive_base.h"

namespace vqkv {

/** {x, signs (float32)} -> vectors. */
class Hadamard : public mx::Primitive {
 public:
  Hadamard(mx::Stream s, bool inverse, mx::Dtype dtype)
      : mx::Primitive(s), inverse_(inverse), dtype_(dtype) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const Hadamard&>(other);
    return inverse_ == o.inverse_ && dtype_ == o.dtype_;
  }
  const char* name() const override { return "RandomizedHadamard"; }

 private:
  bool inverse_;
  mx::Dtype dtype_;
};

/** {x, signs, centroids (both float32)[, centres, centre scales]} -> {packed, scales[, centres,
 * centre scales]}. */
class HadamardQuantize : public mx::Primitive {
 public:
  HadamardQuantize(mx::Stream s, const HadamardCode& code) : mx::Primitive(s), code_(code) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive& other) const override {
    return code_ == static_cast<const HadamardQuantize&>(other).code_;
  }
  const char* name() const override { return "HadamardQuantize"; }

 private:
  HadamardCode code_;
};

/** The launch of each op; output arrays have their data already. */
Launch hadamard_launch(const mx::array& x, const mx::array& signs, const mx::array& out,
                       bool inverse);
Launch hadamard_quantize_launch(const std::vector<mx::array>& in, const std::vector<mx::array>& out,
                                const HadamardCode& code);

/** Native kernels; both queue on the CPU stream. */
void hadamard_cpu(const mx::array& x, const mx::array& signs, mx::array& out, bool inverse,
                  const mx::Stream& s);
void hadamard_quantize_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out,
                           const HadamardCode& code, const mx::Stream& s);

}  // namespace vqkv

#pragma once

#include "launch.h"
#include "metal_params.h"
#include "primitive_base.h"

namespace vqkv {

/** {x, codebook (float32)} -> codes. */
class QuantizeVQ : public mx::Primitive {
 public:
  explicit QuantizeVQ(mx::Stream s) : mx::Primitive(s) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  const char* name() const override { return "QuantizeVQ"; }
};

/** {codes, codebook (output dtype)} -> vectors. A code without a row decodes to NaN. */
class DequantizeVQ : public mx::Primitive {
 public:
  explicit DequantizeVQ(mx::Stream s) : mx::Primitive(s) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  const char* name() const override { return "DequantizeVQ"; }
};

/** {x, y} -> y; the cotangent reaches both. */
class StraightThrough : public mx::Primitive {
 public:
  explicit StraightThrough(mx::Stream s) : mx::Primitive(s) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  const char* name() const override { return "StraightThrough"; }
};

/** The launch of each op; output arrays have their data already. */
Launch quantize_vq_launch(const mx::array& x, const mx::array& codebook, const mx::array& codes);
Launch dequantize_vq_launch(const mx::array& codes, const mx::array& codebook,
                            const mx::array& out);

/** Native kernels; both queue on the CPU stream. */
void quantize_vq_cpu(const mx::array& x, const mx::array& codebook, mx::array& codes,
                     const mx::Stream& s);
void dequantize_vq_cpu(const mx::array& codes, const mx::array& codebook, mx::array& out,
                       const mx::Stream& s);

}  // namespace vqkv

#pragma once

#include "launch.h"
#include "metal_params.h"
#include "primitive_base.h"

namespace vqkv {

/** {x, sketch (float32)} -> {signs, norms}. */
class QjlEncode : public mx::Primitive {
 public:
  explicit QjlEncode(mx::Stream s) : mx::Primitive(s) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  const char* name() const override { return "QjlEncode"; }
};

/** {q, sketch (float32), signs, norms} -> estimates. */
class QjlInnerProduct : public mx::Primitive {
 public:
  explicit QjlInnerProduct(mx::Stream s) : mx::Primitive(s) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  const char* name() const override { return "QjlInnerProduct"; }
};

/** The launches of each op; output arrays have their data already. */
Launch qjl_encode_launch(const mx::array& x, const mx::array& sketch,
                         const std::vector<mx::array>& out);
std::array<Launch, 2> qjl_inner_product_launch(const std::vector<mx::array>& in,
                                               const mx::array& out, Temporaries& temporaries);

/** Native kernels; both queue on the CPU stream. */
void qjl_encode_cpu(const mx::array& x, const mx::array& sketch, std::vector<mx::array>& out,
                    const mx::Stream& s);
void qjl_inner_product_cpu(const std::vector<mx::array>& in, mx::array& out, const mx::Stream& s);

}  // namespace vqkv

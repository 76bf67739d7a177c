#pragma once

#include "launch.h"
#include "metal_params.h"
#include "primitive_base.h"

namespace vqkv {

/** {indices} -> packed. */
class PackBits : public mx::Primitive {
 public:
  PackBits(mx::Stream s, int bits) : mx::Primitive(s), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive& other) const override {
    return bits_ == static_cast<const PackBits&>(other).bits_;
  }
  const char* name() const override { return "PackBits"; }

 private:
  int bits_;
};

/** {packed} -> indices. */
class UnpackBits : public mx::Primitive {
 public:
  UnpackBits(mx::Stream s, int bits, int n) : mx::Primitive(s), bits_(bits), n_(n) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const UnpackBits&>(other);
    return bits_ == o.bits_ && n_ == o.n_;
  }
  const char* name() const override { return "UnpackBits"; }

 private:
  int bits_, n_;
};

/** {x, centroids (float32)} -> packed. */
class QuantizeScalar : public mx::Primitive {
 public:
  QuantizeScalar(mx::Stream s, int bits) : mx::Primitive(s), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive& other) const override {
    return bits_ == static_cast<const QuantizeScalar&>(other).bits_;
  }
  const char* name() const override { return "QuantizeScalar"; }

 private:
  int bits_;
};

/** {packed, centroids (output dtype)} -> values. */
class DequantizeScalar : public mx::Primitive {
 public:
  DequantizeScalar(mx::Stream s, int bits, int n) : mx::Primitive(s), bits_(bits), n_(n) {}

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  VQKV_TRANSFORMS()
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>&) override;
  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const DequantizeScalar&>(other);
    return bits_ == o.bits_ && n_ == o.n_;
  }
  const char* name() const override { return "DequantizeScalar"; }

 private:
  int bits_, n_;
};

/** The launch of each op; output arrays have their data already. */
Launch pack_bits_launch(const mx::array& indices, const mx::array& packed, int bits);
Launch unpack_bits_launch(const mx::array& packed, const mx::array& indices, int bits);
Launch quantize_scalar_launch(const mx::array& x, const mx::array& centroids,
                              const mx::array& packed, int bits);
Launch dequantize_scalar_launch(const mx::array& packed, const mx::array& centroids,
                                const mx::array& out, int bits);

/** Native kernels; all queue on the CPU stream. */
void pack_bits_cpu(const mx::array& indices, mx::array& packed, int bits, const mx::Stream& s);
void unpack_bits_cpu(const mx::array& packed, mx::array& indices, int bits, const mx::Stream& s);
void quantize_scalar_cpu(const mx::array& x, const mx::array& centroids, mx::array& packed,
                         int bits, const mx::Stream& s);
void dequantize_scalar_cpu(const mx::array& packed, const mx::array& centroids, mx::array& out,
                           int bits, const mx::Stream& s);

}  // namespace vqkv

#include "scalar/primitive.h"

#include "evaluate.h"
#include "mlx/ops.h"
#include "scalar/op.h"
#include "vmap.h"

namespace vqkv {
// ---- PackBits ----

void PackBits::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return pack_bits_launch(in[0], out[0], bits_); },
      [&] { pack_bits_cpu(in[0], out[0], bits_, stream()); });
}

void PackBits::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(), [&](auto&) { return pack_bits_launch(in[0], out[0], bits_); });
}

std::vector<mx::Shape> PackBits::output_shapes(const std::vector<mx::array>& in) {
  return {packed_shape("pack_bits", in[0].shape(), bits_)};
}

std::vector<mx::array> PackBits::vjp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>&, const std::vector<int>& argnums,
                                     const std::vector<mx::array>&) {
  return zero_gradients(primals, argnums, stream());
}

std::vector<mx::array> PackBits::jvp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>&, const std::vector<int>&) {
  return {mx::zeros(output_shapes(primals)[0], mx::uint8, stream())};
}

std::pair<std::vector<mx::array>, std::vector<int>> PackBits::vmap(const std::vector<mx::array>& in,
                                                                   const std::vector<int>& axes) {
  return {{pack_bits(mx::moveaxis(in[0], axes[0], 0, stream()), bits_, stream())}, {0}};
}

// ---- UnpackBits ----

void UnpackBits::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return unpack_bits_launch(in[0], out[0], bits_); },
      [&] { unpack_bits_cpu(in[0], out[0], bits_, stream()); });
}

void UnpackBits::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(), [&](auto&) { return unpack_bits_launch(in[0], out[0], bits_); });
}

std::vector<mx::Shape> UnpackBits::output_shapes(const std::vector<mx::array>& in) {
  return {unpacked_shape("unpack_bits", in[0].shape(), bits_, n_)};
}

std::vector<mx::array> UnpackBits::vjp(const std::vector<mx::array>& primals,
                                       const std::vector<mx::array>&,
                                       const std::vector<int>& argnums,
                                       const std::vector<mx::array>&) {
  return zero_gradients(primals, argnums, stream());
}

std::vector<mx::array> UnpackBits::jvp(const std::vector<mx::array>& primals,
                                       const std::vector<mx::array>&, const std::vector<int>&) {
  return {mx::zeros(output_shapes(primals)[0], index_dtype(bits_), stream())};
}

std::pair<std::vector<mx::array>, std::vector<int>> UnpackBits::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  return {{unpack_bits(mx::moveaxis(in[0], axes[0], 0, stream()), bits_, n_, stream())}, {0}};
}

// ---- QuantizeScalar ----

void QuantizeScalar::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return quantize_scalar_launch(in[0], in[1], out[0], bits_); },
      [&] { quantize_scalar_cpu(in[0], in[1], out[0], bits_, stream()); });
}

void QuantizeScalar::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(),
               [&](auto&) { return quantize_scalar_launch(in[0], in[1], out[0], bits_); });
}

std::vector<mx::Shape> QuantizeScalar::output_shapes(const std::vector<mx::array>& in) {
  return {packed_shape("quantize_scalar", in[0].shape(), bits_)};
}

// Indices are piecewise constant: every derivative is zero.
std::vector<mx::array> QuantizeScalar::vjp(const std::vector<mx::array>& primals,
                                           const std::vector<mx::array>&,
                                           const std::vector<int>& argnums,
                                           const std::vector<mx::array>&) {
  return zero_gradients(primals, argnums, stream());
}

std::vector<mx::array> QuantizeScalar::jvp(const std::vector<mx::array>& primals,
                                           const std::vector<mx::array>&, const std::vector<int>&) {
  return {mx::zeros(output_shapes(primals)[0], mx::uint8, stream())};
}

std::pair<std::vector<mx::array>, std::vector<int>> QuantizeScalar::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  return map_tables(in, axes, stream(), [&](const std::vector<mx::array>& a) {
    return quantize_scalar(a[0], a[1], bits_, stream());
  });
}

// ---- DequantizeScalar ----

void DequantizeScalar::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return dequantize_scalar_launch(in[0], in[1], out[0], bits_); },
      [&] { dequantize_scalar_cpu(in[0], in[1], out[0], bits_, stream()); });
}

void DequantizeScalar::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(),
               [&](auto&) { return dequantize_scalar_launch(in[0], in[1], out[0], bits_); });
}

std::vector<mx::Shape> DequantizeScalar::output_shapes(const std::vector<mx::array>& in) {
  return {unpacked_shape("dequantize_scalar", in[0].shape(), bits_, n_)};
}

std::vector<mx::array> DequantizeScalar::vjp(const std::vector<mx::array>& primals,
                                             const std::vector<mx::array>& cotangents,
                                             const std::vector<int>& argnums,
                                             const std::vector<mx::array>&) {
  auto s = stream();
  std::vector<mx::array> grads;
  for (int a : argnums) {
    if (a == 0) {
      grads.push_back(mx::zeros_like(primals[0], s));
      continue;
    }
    auto index = mx::flatten(unpack_bits(primals[0], bits_, n_, s), s);
    auto updates = mx::reshape(mx::astype(cotangents[0], mx::float32, s),
                               {static_cast<int>(cotangents[0].size()), 1}, s);
    auto zero = mx::zeros({1 << bits_}, mx::float32, s);
    auto sum = mx::scatter_add(zero, std::vector<mx::array>{index}, updates, {0}, s);
    grads.push_back(mx::astype(sum, primals[1].dtype(), s));
  }
  return grads;
}

std::vector<mx::array> DequantizeScalar::jvp(const std::vector<mx::array>& primals,
                                             const std::vector<mx::array>& tangents,
                                             const std::vector<int>& argnums) {
  for (size_t i = 0; i < argnums.size(); ++i) {
    if (argnums[i] == 1) {
      return {dequantize_scalar(primals[0], tangents[i], bits_, n_, std::nullopt, stream())};
    }
  }
  return {mx::zeros(output_shapes(primals)[0], primals[1].dtype(), stream())};
}

std::pair<std::vector<mx::array>, std::vector<int>> DequantizeScalar::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  return map_tables(in, axes, stream(), [&](const std::vector<mx::array>& a) {
    return dequantize_scalar(a[0], a[1], bits_, n_, std::nullopt, stream());
  });
}

}  // namespace vqkv

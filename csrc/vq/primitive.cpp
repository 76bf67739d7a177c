#include "vq/primitive.h"

#include "evaluate.h"
#include "mlx/ops.h"
#include "vmap.h"
#include "vq/op.h"

namespace vqkv {
// ---- QuantizeVQ ----

void QuantizeVQ::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return quantize_vq_launch(in[0], in[1], out[0]); },
      [&] { quantize_vq_cpu(in[0], in[1], out[0], stream()); });
}

void QuantizeVQ::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(), [&](auto&) { return quantize_vq_launch(in[0], in[1], out[0]); });
}

std::vector<mx::Shape> QuantizeVQ::output_shapes(const std::vector<mx::array>& in) {
  auto shape = in[0].shape();
  shape.back() /= in[1].shape(-1);
  return {shape};
}

// Codes are piecewise constant: every derivative is zero.
std::vector<mx::array> QuantizeVQ::vjp(const std::vector<mx::array>& primals,
                                       const std::vector<mx::array>&,
                                       const std::vector<int>& argnums,
                                       const std::vector<mx::array>&) {
  return zero_gradients(primals, argnums, stream());
}

std::vector<mx::array> QuantizeVQ::jvp(const std::vector<mx::array>& primals,
                                       const std::vector<mx::array>&, const std::vector<int>&) {
  auto dtype = primals[1].shape(-2) <= 256 ? mx::uint8 : mx::uint16;
  return {mx::zeros(output_shapes(primals)[0], dtype, stream())};
}

std::pair<std::vector<mx::array>, std::vector<int>> QuantizeVQ::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  return map_tables(in, axes, stream(), [&](const std::vector<mx::array>& a) {
    return quantize_vq(a[0], a[1], stream());
  });
}

// ---- DequantizeVQ ----

void DequantizeVQ::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return dequantize_vq_launch(in[0], in[1], out[0]); },
      [&] { dequantize_vq_cpu(in[0], in[1], out[0], stream()); });
}

void DequantizeVQ::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(), [&](auto&) { return dequantize_vq_launch(in[0], in[1], out[0]); });
}

std::vector<mx::Shape> DequantizeVQ::output_shapes(const std::vector<mx::array>& in) {
  auto shape = in[0].shape();
  shape.back() *= in[1].shape(-1);
  return {shape};
}

std::vector<mx::array> DequantizeVQ::vjp(const std::vector<mx::array>& primals,
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
    // Scatter-add into [books * (rows + 1), dims]; the extra row takes codes that have no row.
    const auto& codes = primals[0];
    const auto& book = primals[1];
    auto p = vq_params("dequantize_vq", codes.shape(), book.shape(), true);
    const int stride = p.rows + 1;
    auto index = mx::minimum(mx::astype(codes, mx::int32, s), mx::array(p.rows), s);
    if (p.per_group) {
      index = mx::add(index, mx::multiply(mx::arange(p.groups, s), mx::array(stride), s), s);
    }
    if (p.per_head) {
      auto h = mx::arange(static_cast<int>(p.heads), s);
      h = mx::multiply(h, mx::array(stride * (p.per_group ? p.groups : 1)), s);
      index = mx::add(index, mx::reshape(h, {static_cast<int>(p.heads), 1, 1}, s), s);
    }
    const int books = static_cast<int>(book.size() / (int64_t(p.rows) * p.dims));
    auto zero = mx::zeros({books * stride, p.dims}, mx::float32, s);
    auto updates = mx::reshape(mx::astype(cotangents[0], mx::float32, s),
                               {static_cast<int>(codes.size()), 1, p.dims}, s);
    auto sum = mx::scatter_add(zero, std::vector<mx::array>{mx::flatten(index, s)}, updates,
                               std::vector<int>{0}, s);
    sum = mx::slice(mx::reshape(sum, {books, stride, p.dims}, s), {0, 0, 0},
                    {books, p.rows, p.dims}, s);
    grads.push_back(mx::astype(mx::reshape(sum, book.shape(), s), book.dtype(), s));
  }
  return grads;
}

std::vector<mx::array> DequantizeVQ::jvp(const std::vector<mx::array>& primals,
                                         const std::vector<mx::array>& tangents,
                                         const std::vector<int>& argnums) {
  for (size_t i = 0; i < argnums.size(); ++i) {
    if (argnums[i] == 1) {
      return {dequantize_vq(primals[0], tangents[i], primals[1].dtype(), stream())};
    }
  }
  return {mx::zeros(output_shapes(primals)[0], primals[1].dtype(), stream())};
}

std::pair<std::vector<mx::array>, std::vector<int>> DequantizeVQ::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  return map_tables(in, axes, stream(), [&](const std::vector<mx::array>& a) {
    return dequantize_vq(a[0], a[1], std::nullopt, stream());
  });
}

// ---- StraightThrough ----

void StraightThrough::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  out[0].copy_shared_buffer(in[1]);
}

void StraightThrough::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  out[0].copy_shared_buffer(in[1]);
}

std::vector<mx::Shape> StraightThrough::output_shapes(const std::vector<mx::array>& in) {
  return {in[1].shape()};
}

std::vector<mx::array> StraightThrough::vjp(const std::vector<mx::array>&,
                                            const std::vector<mx::array>& cotangents,
                                            const std::vector<int>& argnums,
                                            const std::vector<mx::array>&) {
  return std::vector<mx::array>(argnums.size(), cotangents[0]);
}

std::vector<mx::array> StraightThrough::jvp(const std::vector<mx::array>&,
                                            const std::vector<mx::array>& tangents,
                                            const std::vector<int>&) {
  return {tangents.size() == 1 ? tangents[0] : mx::add(tangents[0], tangents[1], stream())};
}

std::pair<std::vector<mx::array>, std::vector<int>> StraightThrough::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  auto s = stream();
  auto front = [&](int i) { return axes[i] >= 0 ? mx::moveaxis(in[i], axes[i], 0, s) : in[i]; };
  auto x = front(0), y = front(1);
  y = mx::broadcast_to(y, axes[0] >= 0 ? x.shape() : y.shape(), s);
  x = mx::broadcast_to(x, y.shape(), s);
  return {{mx::array(y.shape(), y.dtype(), std::make_shared<StraightThrough>(s), {x, y})}, {0}};
}

}  // namespace vqkv

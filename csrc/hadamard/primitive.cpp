#include "hadamard/primitive.h"

#include "evaluate.h"
#include "mlx/ops.h"
#include "vmap.h"

namespace vqkv {
namespace {

mx::array ones(const mx::array& x, mx::Stream s) {
  return mx::ones({x.shape(-1)}, mx::float32, s);
}

/** Sum over the axes that signs ([D] or [H, D] with [..., H, S, D]) lack. */
mx::array reduce_to_signs(const mx::array& g, const mx::array& signs, mx::Stream s) {
  std::vector<int> axes;
  const int ndim = static_cast<int>(g.ndim());
  for (int i = 0; i + 1 < ndim; ++i) {
    if (signs.ndim() == 1 || i != ndim - 3) {
      axes.push_back(i);
    }
  }
  return mx::sum(g, axes, false, s);
}

}  // namespace

// ---- Hadamard ----

void Hadamard::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return hadamard_launch(in[0], in[1], out[0], inverse_); },
      [&] { hadamard_cpu(in[0], in[1], out[0], inverse_, stream()); });
}

void Hadamard::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(),
               [&](auto&) { return hadamard_launch(in[0], in[1], out[0], inverse_); });
}

std::vector<mx::Shape> Hadamard::output_shapes(const std::vector<mx::array>& in) {
  return {in[0].shape()};
}

// Linear in x and in the signs; the transpose of one direction is the other.
std::vector<mx::array> Hadamard::vjp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>& cotangents,
                                     const std::vector<int>& argnums,
                                     const std::vector<mx::array>&) {
  auto s = stream();
  const auto& x = primals[0];
  const auto& signs = primals[1];
  auto g = mx::astype(cotangents[0], mx::float32, s);
  std::vector<mx::array> grads;
  for (int a : argnums) {
    if (a == 0) {
      grads.push_back(hadamard(g, signs, !inverse_, x.dtype(), s));
      continue;
    }
    // forward: signs meet x, and g turned back; inverse: they meet g, and x turned back
    auto turned = hadamard(inverse_ ? x : g, ones(x, s), true, mx::float32, s);
    auto other = inverse_ ? g : mx::astype(x, mx::float32, s);
    grads.push_back(reduce_to_signs(mx::multiply(turned, other, s), signs, s));
  }
  return grads;
}

std::vector<mx::array> Hadamard::jvp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>& tangents,
                                     const std::vector<int>& argnums) {
  auto s = stream();
  std::vector<mx::array> parts;
  for (size_t i = 0; i < argnums.size(); ++i) {
    parts.push_back(argnums[i] == 0 ? hadamard(tangents[i], primals[1], inverse_, mx::float32, s)
                                    : hadamard(primals[0], tangents[i], inverse_, mx::float32, s));
  }
  auto sum = parts.size() == 1 ? parts[0] : mx::add(parts[0], parts[1], s);
  return {mx::astype(sum, dtype_, s)};
}

std::pair<std::vector<mx::array>, std::vector<int>> Hadamard::vmap(const std::vector<mx::array>& in,
                                                                   const std::vector<int>& axes) {
  auto s = stream();
  auto front = calls_first(in, axes, s);
  auto x = front[0], signs = front[1];
  if (axes[1] < 0) {
    return {{hadamard(x, signs, inverse_, dtype_, s)}, {0}};
  }
  // The signs differ from call to call: they are applied outside.
  const bool per_head = signs.ndim() == 3;
  mx::Shape shape{signs.shape(0)};
  const int ndim = static_cast<int>(in[0].ndim()) - (axes[0] >= 0 ? 1 : 0);
  for (int i = 0; i < ndim; ++i) {
    const bool head = per_head && i == ndim - 3;
    shape.push_back(i == ndim - 1 ? signs.shape(-1) : head ? signs.shape(1) : 1);
  }
  signs = mx::reshape(signs, shape, s);
  x = mx::astype(axes[0] >= 0 ? x : mx::expand_dims(x, 0, s), mx::float32, s);
  if (inverse_) {
    auto y = mx::multiply(hadamard(x, ones(x, s), true, mx::float32, s), signs, s);
    return {{mx::astype(y, dtype_, s)}, {0}};
  }
  return {{hadamard(mx::multiply(x, signs, s), ones(x, s), false, dtype_, s)}, {0}};
}

// ---- HadamardQuantize ----

void HadamardQuantize::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return hadamard_quantize_launch(in, out, code_); },
      [&] { hadamard_quantize_cpu(in, out, code_, stream()); });
}

void HadamardQuantize::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(), [&](auto&) { return hadamard_quantize_launch(in, out, code_); });
}

std::vector<mx::Shape> HadamardQuantize::output_shapes(const std::vector<mx::array>& in) {
  return hadamard_quantize_shapes(in[0].shape(), code_);
}

// Codes are piecewise constant, and the scales count as part of them: every derivative is zero.
std::vector<mx::array> HadamardQuantize::vjp(const std::vector<mx::array>& primals,
                                             const std::vector<mx::array>&,
                                             const std::vector<int>& argnums,
                                             const std::vector<mx::array>&) {
  return zero_gradients(primals, argnums, stream());
}

std::vector<mx::array> HadamardQuantize::jvp(const std::vector<mx::array>& primals,
                                             const std::vector<mx::array>&,
                                             const std::vector<int>&) {
  const mx::Dtype dtypes[] = {mx::uint8, mx::bfloat16, mx::int8, mx::bfloat16};
  std::vector<mx::array> out;
  for (const auto& shape : output_shapes(primals)) {
    out.push_back(mx::zeros(shape, dtypes[out.size()], stream()));
  }
  return out;
}

std::pair<std::vector<mx::array>, std::vector<int>> HadamardQuantize::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  auto s = stream();
  const bool frozen = in.size() > 3;
  auto call = [&](const std::vector<mx::array>& a) {
    auto optional = [&](size_t i) { return frozen ? std::optional(a[i]) : std::nullopt; };
    auto block = code_.block ? std::optional(code_.block) : std::nullopt;
    return hadamard_quantize(a[0], a[1], a[2], code_.bits, row_scale_name(code_.kind), block,
                             optional(3), optional(4), s);
  };
  if (axes[1] >= 0 || axes[2] >= 0) {
    return map_calls(in, axes, s, call);
  }
  auto out = call(calls_first(in, axes, s, {0, 3, 4}));
  return {out, std::vector<int>(out.size(), 0)};
}

}  // namespace vqkv

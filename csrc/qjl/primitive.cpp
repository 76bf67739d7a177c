#include "qjl/primitive.h"

#include <algorithm>

#include "evaluate.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "qjl/op.h"
#include "reference.h"
#include "vmap.h"

namespace vqkv {
namespace {

/** x / ||x|| in float32, zero for a zero vector: the derivative of the norm. */
mx::array direction(const mx::array& x, mx::Stream s) {
  auto wide = mx::astype(x, mx::float32, s);
  auto norm = mx::sqrt(mx::sum(mx::square(wide, s), -1, true, s), s);
  auto zero = mx::equal(norm, mx::array(0.0f), s);
  return mx::divide(wide, mx::where(zero, mx::array(1.0f), norm, s), s);
}

}  // namespace

// ---- QjlEncode ----

void QjlEncode::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return qjl_encode_launch(in[0], in[1], out); },
      [&] { qjl_encode_cpu(in[0], in[1], out, stream()); });
}

void QjlEncode::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(), [&](auto&) { return qjl_encode_launch(in[0], in[1], out); });
}

std::vector<mx::Shape> QjlEncode::output_shapes(const std::vector<mx::array>& in) {
  auto norms = in[0].shape();
  norms.pop_back();
  auto signs = in[0].shape();
  signs.back() = in[1].shape(0) / 8;
  return {signs, norms};
}

// Signs are piecewise constant; the norm is differentiable.
std::vector<mx::array> QjlEncode::vjp(const std::vector<mx::array>& primals,
                                      const std::vector<mx::array>& cotangents,
                                      const std::vector<int>& argnums,
                                      const std::vector<mx::array>&) {
  auto s = stream();
  std::vector<mx::array> grads;
  for (int a : argnums) {
    if (a == 0) {
      auto weight = mx::expand_dims(mx::astype(cotangents[1], mx::float32, s), -1, s);
      auto grad = mx::multiply(weight, direction(primals[0], s), s);
      grads.push_back(mx::astype(grad, primals[0].dtype(), s));
    } else {
      grads.push_back(mx::zeros_like(primals[a], s));
    }
  }
  return grads;
}

std::vector<mx::array> QjlEncode::jvp(const std::vector<mx::array>& primals,
                                      const std::vector<mx::array>& tangents,
                                      const std::vector<int>& argnums) {
  auto s = stream();
  auto shapes = output_shapes(primals);
  auto norms = mx::zeros(shapes[1], mx::bfloat16, s);
  for (size_t i = 0; i < argnums.size(); ++i) {
    if (argnums[i] == 0) {
      auto along = mx::multiply(tangents[i], direction(primals[0], s), s);
      norms = mx::astype(mx::sum(along, -1, false, s), mx::bfloat16, s);
    }
  }
  return {mx::zeros(shapes[0], mx::uint8, s), norms};
}

std::pair<std::vector<mx::array>, std::vector<int>> QjlEncode::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  return map_tables(in, axes, stream(), [&](const std::vector<mx::array>& a) {
    return qjl_encode(a[0], a[1], stream());
  });
}

// ---- QjlInnerProduct ----

void QjlInnerProduct::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(),
      [&](auto& temporaries) { return qjl_inner_product_launch(in, out[0], temporaries); },
      [&] { qjl_inner_product_cpu(in, out[0], stream()); });
}

void QjlInnerProduct::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(), [&](auto& temporaries) {
    return qjl_inner_product_launch(in, out[0], temporaries);
  });
}

std::vector<mx::Shape> QjlInnerProduct::output_shapes(const std::vector<mx::array>& in) {
  auto shape = in[0].shape();
  shape.back() = in[2].shape(-2);
  return {shape};
}

// The reference differentiates the others; the codes are constant.
std::vector<mx::array> QjlInnerProduct::vjp(const std::vector<mx::array>& primals,
                                            const std::vector<mx::array>& cotangents,
                                            const std::vector<int>& argnums,
                                            const std::vector<mx::array>&) {
  std::vector<mx::array> some;
  std::vector<int> which;
  for (int a : argnums) {
    if (a != 2) {
      some.push_back(primals[a]);
      which.push_back(a);
    }
  }
  auto f = reference_in(reference("qjl_inner_product", {}), primals, which);
  auto found = some.empty() ? some : mx::vjp(f, some, cotangents).second;
  std::vector<mx::array> grads;
  for (int a : argnums) {
    if (a == 2) {
      grads.push_back(mx::zeros_like(primals[2], stream()));
    } else {
      grads.push_back(found[std::find(which.begin(), which.end(), a) - which.begin()]);
    }
  }
  return grads;
}

std::vector<mx::array> QjlInnerProduct::jvp(const std::vector<mx::array>& primals,
                                            const std::vector<mx::array>& tangents,
                                            const std::vector<int>& argnums) {
  std::vector<mx::array> some, directions;
  std::vector<int> which;
  for (size_t i = 0; i < argnums.size(); ++i) {
    if (argnums[i] != 2) {
      some.push_back(primals[argnums[i]]);
      directions.push_back(tangents[i]);
      which.push_back(argnums[i]);
    }
  }
  if (some.empty()) {
    return {mx::zeros(output_shapes(primals)[0], mx::float32, stream())};
  }
  auto f = reference_in(reference("qjl_inner_product", {}), primals, which);
  return mx::jvp(f, some, directions).second;
}

// A mapped axis becomes a leading dimension of q, signs and norms.
std::pair<std::vector<mx::array>, std::vector<int>> QjlInnerProduct::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  auto s = stream();
  auto call = [&](const std::vector<mx::array>& a) {
    return std::vector<mx::array>{qjl_inner_product(a[0], a[1], a[2], a[3], s)};
  };
  if (axes[1] >= 0) {
    return map_calls(in, axes, s, call);
  }
  return {call(calls_first(in, axes, s, {0, 2, 3})), {0}};
}

}  // namespace vqkv

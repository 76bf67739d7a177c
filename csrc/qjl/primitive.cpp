#include "qjl/primitive.h"

#include <algorithm>

#include "backend/backend.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "qjl/op.h"
#include "reference.h"

namespace vqkv {
namespace {

/** Entry i of an input that vmap maps over axis 0, or the input itself. */
mx::array entry(const mx::array& a, bool mapped, int i, mx::Stream s) {
  return mapped ? mx::take(a, i, 0, s) : a;
}

/** Inputs with their mapped axis, if they have one, in front; the number of entries in `n`. */
std::vector<mx::array> mapped_first(const std::vector<mx::array>& in, const std::vector<int>& axes,
                                    mx::Stream s, int& n) {
  std::vector<mx::array> front;
  for (size_t i = 0; i < in.size(); ++i) {
    front.push_back(axes[i] > 0 ? mx::moveaxis(in[i], axes[i], 0, s) : in[i]);
    n = axes[i] >= 0 ? in[i].shape(axes[i]) : n;
  }
  return front;
}

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
  allocate(out);
  if (out[0].size() == 0) {
    return;
  }
  if (backend::simulated()) {
    backend::run_simulated(stream(), qjl_encode_launch(in[0], in[1], out), {});
  } else {
    qjl_encode_cpu(in[0], in[1], out, stream());
  }
}

void QjlEncode::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  allocate(out);
  if (out[0].size() > 0) {
    backend::run_gpu(stream(), qjl_encode_launch(in[0], in[1], out), {});
  }
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
  auto s = stream();
  int n = 0;
  auto front = mapped_first(in, axes, s, n);
  if (axes[1] < 0) {
    return {qjl_encode(front[0], front[1], s), {0, 0}};
  }
  std::vector<mx::array> signs, norms;
  for (int i = 0; i < n; ++i) {
    auto one = qjl_encode(entry(front[0], axes[0] >= 0, i, s), entry(front[1], true, i, s), s);
    signs.push_back(one[0]);
    norms.push_back(one[1]);
  }
  return {{mx::stack(signs, 0, s), mx::stack(norms, 0, s)}, {0, 0}};
}

// ---- QjlInnerProduct ----

void QjlInnerProduct::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  allocate(out);
  if (out[0].size() == 0) {
    return;
  }
  if (backend::simulated()) {
    std::vector<mx::array> temporaries;
    auto launches = qjl_inner_product_launch(in, out[0], temporaries);
    backend::run_simulated(stream(), launches, temporaries);
  } else {
    qjl_inner_product_cpu(in, out[0], stream());
  }
}

void QjlInnerProduct::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  allocate(out);
  if (out[0].size() > 0) {
    std::vector<mx::array> temporaries;
    auto launches = qjl_inner_product_launch(in, out[0], temporaries);
    backend::run_gpu(stream(), launches, temporaries);
  }
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
  auto ref = reference("qjl_inner_product", {});
  auto f = [&](const std::vector<mx::array>& args) {
    auto all = primals;
    for (size_t i = 0; i < which.size(); ++i) {
      all[which[i]] = args[i];
    }
    return ref(all);
  };
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
  auto ref = reference("qjl_inner_product", {});
  auto f = [&](const std::vector<mx::array>& args) {
    auto all = primals;
    for (size_t i = 0; i < which.size(); ++i) {
      all[which[i]] = args[i];
    }
    return ref(all);
  };
  return mx::jvp(f, some, directions).second;
}

// A mapped axis becomes a leading dimension of q, signs and norms.
std::pair<std::vector<mx::array>, std::vector<int>> QjlInnerProduct::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  auto s = stream();
  int n = 0;
  auto front = mapped_first(in, axes, s, n);
  if (axes[1] >= 0) {
    std::vector<mx::array> parts;
    for (int i = 0; i < n; ++i) {
      auto at = [&](int k) { return entry(front[k], axes[k] >= 0, i, s); };
      parts.push_back(qjl_inner_product(at(0), at(1), at(2), at(3), s));
    }
    return {{mx::stack(parts, 0, s)}, {0}};
  }
  for (int k : {0, 2, 3}) {
    if (axes[k] < 0) {
      auto shape = front[k].shape();
      shape.insert(shape.begin(), n);
      front[k] = mx::broadcast_to(front[k], shape, s);
    }
  }
  return {{qjl_inner_product(front[0], front[1], front[2], front[3], s)}, {0}};
}

}  // namespace vqkv

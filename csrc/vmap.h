// vmap of primitives. Kernels take the calls as a leading axis of their data, but have no tables
// that differ from call to call.
#pragma once

#include <initializer_list>

#include "primitive_base.h"

namespace vqkv {

/** Outputs, and the axis of each along which the calls lie. */
using Mapped = std::pair<std::vector<mx::array>, std::vector<int>>;

/** How many calls there are. */
inline int calls(const std::vector<mx::array>& in, const std::vector<int>& axes) {
  int n = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    n = axes[i] >= 0 ? in[i].shape(axes[i]) : n;
  }
  return n;
}

/** The inputs, with the calls along axis 0 of those that differ from call to call and of `data`. */
inline std::vector<mx::array> calls_first(const std::vector<mx::array>& in,
                                          const std::vector<int>& axes, mx::Stream s,
                                          std::initializer_list<size_t> data = {}) {
  std::vector<mx::array> front;
  for (size_t i = 0; i < in.size(); ++i) {
    front.push_back(axes[i] > 0 ? mx::moveaxis(in[i], axes[i], 0, s) : in[i]);
  }
  for (size_t i : data) {
    if (i < in.size() && axes[i] < 0) {
      auto shape = in[i].shape();
      shape.insert(shape.begin(), calls(in, axes));
      front[i] = mx::broadcast_to(in[i], shape, s);
    }
  }
  return front;
}

/** One `call(inputs)` after the other, each of its outputs stacked. */
template <typename Call>
Mapped map_calls(const std::vector<mx::array>& in, const std::vector<int>& axes, mx::Stream s,
                 Call call) {
  const int n = calls(in, axes);
  require(n > 0, "vmap", "an axis of tables must have entries, but has none.");
  auto front = calls_first(in, axes, s);
  std::vector<std::vector<mx::array>> parts;
  for (int k = 0; k < n; ++k) {
    auto one = front;
    for (size_t i = 0; i < in.size(); ++i) {
      one[i] = axes[i] >= 0 ? mx::take(front[i], k, 0, s) : front[i];
    }
    auto found = call(one);
    parts.resize(found.size());
    for (size_t j = 0; j < found.size(); ++j) {
      parts[j].push_back(found[j]);
    }
  }
  std::vector<mx::array> out;
  for (auto& p : parts) {
    out.push_back(mx::stack(p, 0, s));
  }
  return {out, std::vector<int>(out.size(), 0)};
}

/** For inputs {data, table}: one call, or where tables differ one each. */
template <typename Call>
Mapped map_tables(const std::vector<mx::array>& in, const std::vector<int>& axes, mx::Stream s,
                  Call call) {
  auto outputs = [&](const std::vector<mx::array>& inputs) {
    return std::vector<mx::array>{call(inputs)};
  };
  if (axes[1] >= 0) {
    return map_calls(in, axes, s, outputs);
  }
  auto out = outputs(calls_first(in, axes, s));
  return {out, std::vector<int>(out.size(), 0)};
}

}  // namespace vqkv

// Inputs as the kernels read them.
#pragma once

#include <utility>
#include <vector>

#include "launch.h"
#include "mlx/ops.h"

namespace vqkv {

/** Row-major; without a node in the graph where the layout is known already. */
inline mx::array contiguous(const mx::array& a, mx::Stream s) {
  const bool known = a.status() != mx::array::Status::unscheduled;
  return known && a.flags().row_contiguous ? a : mx::contiguous(a, false, s);
}

/** The same in another dtype. */
inline mx::array contiguous(const mx::array& a, mx::Dtype dtype, mx::Stream s) {
  return a.dtype() == dtype ? contiguous(a, s) : contiguous(mx::astype(a, dtype, s), s);
}

/** The inputs of a node. An initializer list would copy each. */
template <typename... Each>
std::vector<mx::array> inputs_of(Each&&... each) {
  std::vector<mx::array> inputs;
  inputs.reserve(sizeof...(each));
  (inputs.push_back(std::forward<Each>(each)), ...);
  return inputs;
}

/**
 * The array itself where it is row-major, else a copy, which joins the temporaries. For use in the
 * eval of a primitive: spares the graph a node.
 */
mx::array row_major(const mx::array& a, mx::Stream s, Temporaries& temporaries);

}  // namespace vqkv

// Declarations every primitive of this package repeats.
#pragma once

#include "backend/backend.h"
#include "common.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

#define VQKV_TRANSFORMS()                                                                      \
  std::vector<mx::array> jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,     \
                             const std::vector<int>&) override;                                \
  std::vector<mx::array> vjp(const std::vector<mx::array>&, const std::vector<mx::array>&,     \
                             const std::vector<int>&, const std::vector<mx::array>&) override; \
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>&,      \
                                                           const std::vector<int>&) override;

namespace vqkv {

/** Memory for the outputs of a primitive. */
inline void allocate(std::vector<mx::array>& out, const mx::Stream& s) {
  for (auto& a : out) {
    backend::allocate(a, s);
  }
}

/** What vjp gives where a result is piecewise constant: every derivative is zero. */
inline std::vector<mx::array> zero_gradients(const std::vector<mx::array>& primals,
                                             const std::vector<int>& argnums, mx::Stream s) {
  std::vector<mx::array> grads;
  for (int a : argnums) {
    grads.push_back(mx::zeros_like(primals[a], s));
  }
  return grads;
}

}  // namespace vqkv

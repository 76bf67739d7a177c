// Declarations every primitive of this package repeats.
#pragma once

#include "common.h"
#include "mlx/primitives.h"

#define VQKV_TRANSFORMS()                                                                      \
  std::vector<mx::array> jvp(const std::vector<mx::array>&, const std::vector<mx::array>&,     \
                             const std::vector<int>&) override;                                \
  std::vector<mx::array> vjp(const std::vector<mx::array>&, const std::vector<mx::array>&,     \
                             const std::vector<int>&, const std::vector<mx::array>&) override; \
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>&,      \
                                                           const std::vector<int>&) override;

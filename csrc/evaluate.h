// What eval_cpu and eval_gpu of every primitive do: give the outputs memory, and fill them unless
// they are empty.
#pragma once

#include <span>
#include <utility>

#include "primitive_base.h"

namespace vqkv {

/** An op has one launch, or an array of them. */
inline std::span<const Launch> in_turn(const Launch& one) {
  return {&one, 1};
}
inline std::span<const Launch> in_turn(std::span<const Launch> several) {
  return several;
}

/** By the native kernel, `native()`, or in the simulator: `launches(temporaries)` are what runs. */
template <typename Launches, typename Native>
void evaluate_cpu(std::vector<mx::array>& out, mx::Stream s, Launches launches, Native native) {
  backend::allocate_all(out, s);
  if (out[0].size() == 0) {
    return;
  }
  if (backend::simulated()) {
    Temporaries temporaries;
    const auto list = launches(temporaries);
    backend::run_simulated(s, in_turn(list), temporaries);
  } else {
    native();
  }
}

template <typename Launches>
void evaluate_gpu(std::vector<mx::array>& out, mx::Stream s, Launches launches) {
  backend::allocate_all(out, s);
  if (out[0].size() > 0) {
    Temporaries temporaries;
    const auto list = launches(temporaries);
    backend::run_gpu(s, in_turn(list), temporaries);
  }
}

}  // namespace vqkv

// What eval_cpu and eval_gpu of every primitive do: give the outputs memory, and fill them unless
// they are empty.
#pragma once

#include <utility>

#include "primitive_base.h"

namespace vqkv {

/** By the native kernel, `native()`, or in the simulator: `launches(temporaries)` are what runs. */
template <typename Launches, typename Native>
void evaluate_cpu(std::vector<mx::array>& out, mx::Stream s, Launches launches, Native native) {
  allocate(out, s);
  if (out[0].size() == 0) {
    return;
  }
  if (backend::simulated()) {
    std::vector<mx::array> temporaries;
    auto list = launches(temporaries);
    backend::run_simulated(s, list, std::move(temporaries));
  } else {
    native();
  }
}

template <typename Launches>
void evaluate_gpu(std::vector<mx::array>& out, mx::Stream s, Launches launches) {
  allocate(out, s);
  if (out[0].size() > 0) {
    std::vector<mx::array> temporaries;
    auto list = launches(temporaries);
    backend::run_gpu(s, list, std::move(temporaries));
  }
}

}  // namespace vqkv

// Three ways to carry out launches: MLX's Metal encoder, MLX's CUDA encoder, the host simulator.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch.h"

namespace vqkv::backend {

/** Whether the default device has native kernels in this build. */
bool has_kernels();

/** Memory of the stream's device for an array that has none. */
void allocate(mx::array& a, const mx::Stream& s);

/** The same for those of a list that have none. */
template <typename List>
void allocate_all(List& arrays, const mx::Stream& s) {
  for (auto& a : arrays) {
    if (!a.data_shared_ptr()) {
      allocate(a, s);
    }
  }
}

/** The same on this build's GPU. */
void allocate_gpu(mx::array& a, const mx::Stream& s);

/**
 * Encode launches in order on the GPU stream of MLX. `temporaries` get memory, if they have
 * none, which lives until they have run.
 */
void run_gpu(const mx::Stream& s, std::span<const Launch> launches, Temporaries& temporaries);

/** True where this build has a GPU executor ("metal" or "cuda"); its name, else "none". */
const char* gpu_executor();

/** Where the kernels come from ("metallib", "source", "fatbin", "none"); loads them. */
std::string kernel_library();

/** True if eval_cpu must run the Metal kernels in the simulator (VQKV_EXECUTOR=sim). */
bool simulated();

/** Whether the kernels that run have products of quads (metal/prelude.h). */
inline bool quad_matrices() {
  return simulated() || std::string_view(gpu_executor()) == "cuda";
}

/** True if the simulator was built in. */
bool has_simulator();

/** Queue launches on the CPU stream; each runs in the simulator. `temporaries` as above. */
void run_simulated(const mx::Stream& s, std::span<const Launch> launches, Temporaries& temporaries);

/** Kernels that the simulator knows, and those it has run so far in this process. */
std::vector<std::string> simulator_kernels();
std::vector<std::string> simulator_executed();

}  // namespace vqkv::backend

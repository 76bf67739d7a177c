// A Launch says everything an executor must know to run one kernel. Building it is a pure function
// of shapes and constants, so grids, buffer order and parameter bytes are tested on every machine.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common.h"

namespace vqkv {

struct Launch {
  std::string kernel;
  std::vector<mx::array> inputs;   // kernel buffers 0 .. n-1
  std::vector<mx::array> outputs;  // the next buffers; the params struct follows them
  std::vector<char> params;
  std::array<uint32_t, 3> grid;  // threadgroups
  uint32_t threads;              // per threadgroup, a multiple of 32
  // CUDA: shared memory besides the arrays of the kernel, as far as the GPU has it: kernels for
  // GPUs of less take less
  uint32_t cuda_shared_bytes = 0;
  uint32_t cuda_more_threads = 0;  // CUDA: if the kernel for this GPU takes them

  template <typename P>
  void set_params(const P& p) {
    params.resize(sizeof(P));
    std::memcpy(params.data(), &p, sizeof(P));
  }
};

/** The dtype as kernel names spell it: "float16", "uint8". */
inline std::string dtype_name(mx::Dtype t) {
  switch (t.val()) {  // a stream would cost as much as a launch
    case mx::Dtype::Val::float16:
      return "float16";
    case mx::Dtype::Val::bfloat16:
      return "bfloat16";
    case mx::Dtype::Val::float32:
      return "float32";
    case mx::Dtype::Val::uint8:
      return "uint8";
    case mx::Dtype::Val::uint16:
      return "uint16";
    default:
      throw std::invalid_argument("[launch] no kernel has this dtype.");
  }
}

/** Whether kernels may read vectors of 16 bytes from the array. */
inline bool aligned(const mx::array& a) {
  return a.offset() % 16 == 0;
}

/** Threadgroups along one axis; refuses what a grid cannot hold. */
inline uint32_t groups(int64_t n, int64_t per_group) {
  int64_t g = (n + per_group - 1) / per_group;
  if (g > INT32_MAX) {
    throw std::invalid_argument("[launch] the array is too large for one grid axis.");
  }
  return static_cast<uint32_t>(g);
}

}  // namespace vqkv

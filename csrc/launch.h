// A Launch says everything an executor must know to run one kernel. Building it is a pure function
// of shapes and constants, so grids, buffer order and parameter bytes are tested on every machine.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
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
inline const char* dtype_name(mx::Dtype t) {
  switch (t.val()) {
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

// Of a call's time on the host the launch is a part that counts: names are built in one piece, and
// launches moved into the list rather than copied as an initializer list would.

inline void append_part(std::string& name, const std::string& part) {
  name += part;
}
inline void append_part(std::string& name, const char* part) {
  name += part;
}
inline void append_part(std::string& name, int part) {
  name += std::to_string(part);
}

/** The parts joined by '_': a kernel's name. */
template <typename... Parts>
std::string kernel_name(const char* first, const Parts&... rest) {
  std::string name;
  name.reserve(64);
  name += first;
  ((name += '_', append_part(name, rest)), ...);
  return name;
}

template <typename... L>
std::vector<Launch> launches(L&&... each) {
  std::vector<Launch> list;
  list.reserve(sizeof...(each));
  (list.push_back(std::forward<L>(each)), ...);
  return list;
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

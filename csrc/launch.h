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

/** The bytes of a params struct of metal/params.h. */
class Params {
 public:
  template <typename P>
  void set(const P& p) {
    static_assert(sizeof(P) <= kMost);
    std::memcpy(bytes_.data(), &p, sizeof(P));
    size_ = sizeof(P);
  }
  const char* data() const { return bytes_.data(); }
  size_t size() const { return size_; }

  static constexpr size_t kMost = 384;

 private:
  alignas(8) std::array<char, kMost> bytes_;
  size_t size_ = 0;
};

struct Launch {
  std::string kernel;
  std::vector<mx::array> inputs;   // kernel buffers 0 .. n-1
  std::vector<mx::array> outputs;  // the next buffers; the params struct follows them
  Params params;
  std::array<uint32_t, 3> grid;  // threadgroups
  uint32_t threads;              // per threadgroup, a multiple of 32
  // CUDA: shared memory besides the arrays of the kernel, as far as the GPU has it: kernels for
  // GPUs of less take less
  uint32_t cuda_shared_bytes = 0;
  uint32_t cuda_more_threads = 0;  // CUDA: if the kernel for this GPU takes them
  // CUDA: no more threadgroups along the first axis than the GPU holds at once; the kernel asks
  // how many there are
  bool cuda_resident = false;
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
// lists without the copies of an initializer list.

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

template <typename T, typename... Each>
std::vector<T> list_of(Each&&... each) {
  std::vector<T> list;
  list.reserve(sizeof...(each));
  (list.push_back(std::forward<Each>(each)), ...);
  return list;
}
template <typename... Each>
std::vector<Launch> launches(Each&&... each) {
  return list_of<Launch>(std::forward<Each>(each)...);
}
template <typename... Each>
std::vector<mx::array> arrays(Each&&... each) {
  return list_of<mx::array>(std::forward<Each>(each)...);
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

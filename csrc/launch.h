// A Launch says everything an executor must know to run one kernel. Building it is a pure function
// of shapes and constants, so grids, buffer order and parameter bytes are tested on every machine.
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <list>
#include <string_view>
#include <type_traits>
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

// Of a call's time on the host the launch is a part that counts: it takes no memory from the heap,
// and names arrays instead of holding them, which would cost each of them two atomic operations.

/** A kernel's name. */
class KernelName {
 public:
  KernelName() = default;

  /** The parts, strings and numbers, joined by '_'. */
  template <typename... Parts>
  explicit KernelName(std::string_view first, const Parts&... rest) {
    append(first);
    ((append("_"), append(rest)), ...);
    text_[size_] = 0;
  }

  std::string_view view() const { return {text_.data(), size_}; }
  const char* c_str() const { return text_.data(); }

 private:
  void append(std::string_view part) {
    if (part.size() >= text_.size() - size_) {
      throw std::logic_error("[launch] a kernel's name must have fewer than 64 characters.");
    }
    std::memcpy(text_.data() + size_, part.data(), part.size());
    size_ += part.size();
  }
  void append(int part) {
    char digits[16];
    const char* end = std::to_chars(digits, std::end(digits), part).ptr;
    append(std::string_view(digits, end - digits));
  }

  std::array<char, 64> text_;
  size_t size_ = 0;
};

/** Arrays by their address; they must outlive the launch. */
using Arrays = mx::SmallVector<const mx::array*, 32>;

template <typename... Each>
Arrays arrays(Each&&... each) {
  static_assert((std::is_lvalue_reference_v<Each> && ...), "a temporary ends before the launch");
  return {&each...};
}
inline Arrays arrays_of(const std::vector<mx::array>& list) {
  Arrays to;
  for (const auto& a : list) {
    to.push_back(&a);
  }
  return to;
}

/** What launches name that is neither input nor output; growing moves none of them. */
using Temporaries = std::list<mx::array>;

struct Launch {
  KernelName kernel;
  Arrays inputs;   // kernel buffers 0 .. n-1
  Arrays outputs;  // the next buffers; the params struct follows them
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

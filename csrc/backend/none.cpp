// No GPU executor in this build.
#include "backend/backend.h"

namespace vqkv::backend {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "[vqkv_ext] this build has no GPU executor; use the CPU device (mx.set_default_device).");
}

}  // namespace

const char* gpu_executor() {
  return "none";
}

std::string kernel_library() {
  return "none";
}

void allocate_gpu(mx::array&, const mx::Stream&) {
  refuse();
}

void run_gpu(const mx::Stream&, std::span<const Launch>, Temporaries&) {
  refuse();
}

}  // namespace vqkv::backend

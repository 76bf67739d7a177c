// No GPU executor in this build.
#include "backend/backend.h"

namespace vqkv::backend {

const char* gpu_executor() {
  return "none";
}

std::string kernel_library() {
  return "none";
}

void run_gpu(const mx::Stream&, const std::vector<Launch>&, const std::vector<mx::array>&) {
  throw std::runtime_error(
      "[vqkv_ext] this build has no GPU executor; use the CPU device (mx.set_default_device).");
}

}  // namespace vqkv::backend

// Encodes launches on MLX's Metal command encoder.
#include <dlfcn.h>

#include <filesystem>
#include <fstream>

#include "backend/backend.h"
#include "mlx/backend/metal/device.h"
#include "mlx/backend/metal/utils.h"

namespace vqkv::backend {
namespace {

std::filesystem::path package_directory() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&package_directory), &info)) {
    throw std::runtime_error("[vqkv_ext] cannot locate the extension module on disk.");
  }
  return std::filesystem::path(info.dli_fname).parent_path();
}

// The shipped metallib, else the kernel sources compiled once per process. One amalgamated file is
// installed by builds on machines without a Metal compiler.
MTL::Library* library(mx::metal::Device& d, std::string* origin = nullptr) {
  static const auto dir = package_directory();
  static const bool precompiled = std::filesystem::exists(dir / "vqkv_ext.metallib");
  if (origin) {
    *origin = precompiled ? "metallib" : "source";
  }
  if (precompiled) {
    return d.get_library("vqkv_ext", dir.string());
  }
  return d.get_library("vqkv_ext", [] {
    std::ifstream in(dir / "vqkv_ext.metal.txt");
    if (!in) {
      throw std::runtime_error(
          "[vqkv_ext] neither vqkv_ext.metallib nor vqkv_ext.metal.txt is in " + dir.string() +
          "; reinstall vqkv-ext.");
    }
    return std::string(std::istreambuf_iterator<char>(in), {});
  });
}

}  // namespace

const char* gpu_executor() {
  return "metal";
}

std::string kernel_library() {
  std::string origin;
  library(mx::metal::device(mx::Device::gpu), &origin);
  return origin;
}

void allocate_gpu(mx::array& a, const mx::Stream&) {
  a.set_data(mx::allocator::malloc(a.nbytes()));
}

void run_gpu(const mx::Stream& s, std::span<const Launch> launches, Temporaries& temporaries) {
  allocate_all(temporaries, s);
  auto& d = mx::metal::device(s.device);
  auto* lib = library(d);
  auto& enc = mx::metal::get_command_encoder(s);
  for (const auto& l : launches) {
    auto* pipeline = d.get_kernel(l.kernel.c_str(), lib);
    if (l.threads > pipeline->maxTotalThreadsPerThreadgroup()) {
      throw std::runtime_error(message("vqkv_ext", "kernel ", l.kernel.view(), " needs ", l.threads,
                                       " threads per threadgroup but this GPU allows ",
                                       pipeline->maxTotalThreadsPerThreadgroup(), "."));
    }
    enc.set_compute_pipeline_state(pipeline);
    int index = 0;
    for (const auto* a : l.inputs) {
      enc.set_input_array(*a, index++);
    }
    for (const auto* a : l.outputs) {
      mx::array written = *a;  // the encoder asks for one that is not const
      enc.set_output_array(written, index++);
    }
    enc.set_bytes(l.params.data(), static_cast<int>(l.params.size()), index);
    enc.dispatch_threadgroups(MTL::Size(l.grid[0], l.grid[1], l.grid[2]),
                              MTL::Size(l.threads, 1, 1));
  }
  enc.add_temporaries(std::vector<mx::array>(temporaries.begin(), temporaries.end()));
}

}  // namespace vqkv::backend

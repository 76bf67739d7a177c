// Adds launches as kernel nodes to the graph of MLX's CUDA encoder. The kernels are loaded with the
// driver API: libmlx has a CUDA runtime of its own, which knows no __global__ function of others.
#include <cuda.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

#include "backend/backend.h"
#include "backend/fatbins.h"
#include "mlx/backend/cuda/cuda.h"
#include "mlx/backend/cuda/device.h"
#include "mlx/backend/cuda/utils.h"

namespace vqkv::backend {
namespace {

void check(CUresult result, const std::string& what) {
  if (result != CUDA_SUCCESS) {
    const char* name = nullptr;
    cuGetErrorName(result, &name);
    throw std::runtime_error(message("vqkv_ext", what, ": ", name ? name : "unknown error", "."));
  }
}

// What a kernel may have without asking.
constexpr uint32_t kSharedBytes = 48 * 1024;

/** The kernels of one device. Its context must be current; they stay loaded. */
class Kernels {
 public:
  void load() {
    if (!modules_.empty()) {
      return;
    }
    std::vector<CUmodule> modules;
    for (const void* const* image = fatbins; *image; ++image) {
      check(cuModuleLoadData(&modules.emplace_back(), *image), "loading the CUDA kernels");
    }
    modules_ = std::move(modules);
  }

  CUfunction get(const std::string& name, uint32_t shared_bytes) {
    if (auto it = functions_.find(name); it != functions_.end()) {
      return it->second;
    }
    load();
    for (auto module : modules_) {
      CUfunction function;
      auto result = cuModuleGetFunction(&function, module, ("vqkv_" + name).c_str());
      if (result != CUDA_ERROR_NOT_FOUND) {
        check(result, "kernel " + name);
        if (shared_bytes > kSharedBytes) {
          check(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                   static_cast<int>(shared_bytes)),
                "shared memory of kernel " + name);
        }
        return functions_[name] = function;
      }
    }
    throw std::runtime_error(message("vqkv_ext", "kernel ", name, " is not in this build."));
  }

 private:
  std::vector<CUmodule> modules_;
  std::unordered_map<std::string, CUfunction> functions_;
};

std::mutex kernels_mutex;

/** Makes the device current; hold kernels_mutex. */
Kernels& kernels(mx::cu::Device& device) {
  static std::map<int, Kernels> all;
  device.make_current();
  return all[device.cuda_device()];
}

// metal/compat/cuda.h: a kernel has one argument, the pointers to its buffers and then the params.
std::vector<char> arguments(const Launch& l) {
  std::vector<char> bytes;
  auto append = [&](const void* data, size_t n) {
    auto* p = static_cast<const char*>(data);
    bytes.insert(bytes.end(), p, p + n);
  };
  for (const auto* side : {&l.inputs, &l.outputs}) {
    for (const auto& a : *side) {
      // not data(), which would move the buffer to unified memory
      const void* buffer = a.size() ? mx::gpu_ptr<void>(a) : nullptr;
      append(&buffer, sizeof(buffer));
    }
  }
  append(l.params.data(), l.params.size());
  bytes.resize((bytes.size() + alignof(void*) - 1) / alignof(void*) * alignof(void*));
  return bytes;
}

}  // namespace

const char* gpu_executor() {
  return "cuda";
}

std::string kernel_library() {
  if (mx::cu::is_available()) {
    std::lock_guard lock(kernels_mutex);
    kernels(mx::cu::device(mx::Device::gpu)).load();
  }
  return "fatbin";
}

void run_gpu(const mx::Stream& s, const std::vector<Launch>& launches,
             const std::vector<mx::array>& temporaries) {
  constexpr uint32_t kMaxGridYZ = 65535;
  auto& enc = mx::cu::get_command_encoder(s);
  for (const auto& l : launches) {
    require(l.grid[1] <= kMaxGridYZ && l.grid[2] <= kMaxGridYZ, "vqkv_ext", "kernel ", l.kernel,
            " needs a grid of ", l.grid[0], " x ", l.grid[1], " x ", l.grid[2],
            " thread blocks, but CUDA allows ", kMaxGridYZ, " along the last two axes.");
    CUfunction function;
    {
      std::lock_guard lock(kernels_mutex);
      function = kernels(enc.device()).get(l.kernel, l.cuda_shared_bytes);
    }
    // Every input costs the graph a dependency and counts as memory that it holds. One that stands
    // in for what there is not is named many times.
    for (size_t i = 0; i < l.inputs.size(); ++i) {
      auto same = [&](const mx::array& other) {
        return other.data_shared_ptr() == l.inputs[i].data_shared_ptr();
      };
      if (std::none_of(l.inputs.begin(), l.inputs.begin() + i, same)) {
        enc.set_input_array(l.inputs[i]);
      }
    }
    for (const auto& a : l.outputs) {
      enc.set_output_array(a);
    }
    auto bytes = arguments(l);
    void* argument = bytes.data();  // copied into the node
    enc.add_kernel_node_raw(function, dim3(l.grid[0], l.grid[1], l.grid[2]), dim3(l.threads),
                            dim3(), l.cuda_shared_bytes, &argument);
  }
  for (const auto& a : temporaries) {
    enc.add_temporary(a);
  }
}

}  // namespace vqkv::backend

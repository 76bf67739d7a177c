// Adds launches as kernel nodes to the graph of MLX's CUDA encoder. The kernels are loaded with the
// driver API: libmlx has a CUDA runtime of its own, which knows no __global__ function of others.
#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "backend/backend.h"
#include "backend/fatbins.h"
#include "mlx/backend/cuda/cuda.h"
#include "mlx/backend/cuda/device.h"
#include "mlx/backend/cuda/utils.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

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

int device_attribute(CUdevice_attribute attribute, const char* what) {
  CUdevice device;
  int value = 0;
  check(cuCtxGetDevice(&device), "the current CUDA device");
  check(cuDeviceGetAttribute(&value, attribute, device), what);
  return value;
}

/** A kernel of the current device, which is asked for what it takes once, or by several threads. */
class Kernel {
 public:
  explicit Kernel(CUfunction function) : function_(function) {}

  CUfunction function() const { return function_; }

  /** Lets blocks have this much shared memory, always the same for a kernel. */
  void allow(uint32_t shared_bytes, std::string_view name) {
    if (shared_bytes > kSharedBytes && !allowed_) {
      check(cuFuncSetAttribute(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                               static_cast<int>(shared_bytes)),
            "shared memory of kernel " + std::string(name));
      allowed_ = true;
    }
  }

  /** The threads that a block may have. */
  uint32_t most_threads() {
    if (!most_threads_) {
      int most = 0;
      check(cuFuncGetAttribute(&most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function_),
            "the threads of a CUDA kernel");
      most_threads_ = static_cast<uint32_t>(most);
    }
    return most_threads_;
  }

  /** The blocks that the device holds at once. */
  uint32_t resident_blocks(uint32_t threads, uint32_t shared_bytes) {
    if (!resident_blocks_) {
      int blocks = 0;
      check(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function_,
                                                        static_cast<int>(threads), shared_bytes),
            "the occupancy of a CUDA kernel");
      const int cores = device_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                         "the multiprocessors of the CUDA device");
      resident_blocks_ = static_cast<uint32_t>(std::max(blocks * cores, 1));
    }
    return resident_blocks_;
  }

 private:
  CUfunction function_;
  std::atomic<bool> allowed_ = false;
  std::atomic<uint32_t> most_threads_ = 0, resident_blocks_ = 0;  // 0: not known yet
};

/** The kernels of one device. Its context must be current; they stay loaded. */
class Kernels {
 public:
  /** Before all else, by one thread at a time. */
  void load() {
    if (!modules_.empty()) {
      return;
    }
    std::vector<CUmodule> modules;
    ByName kernels;
    for (const void* const* image = fatbins; *image; ++image) {
      auto& module = modules.emplace_back();
      check(cuModuleLoadData(&module, *image), "loading the CUDA kernels");
      unsigned count = 0;
      check(cuModuleGetFunctionCount(&count, module), "counting the CUDA kernels");
      std::vector<CUfunction> all(count);
      check(cuModuleEnumerateFunctions(all.data(), count, module), "listing the CUDA kernels");
      for (auto function : all) {
        const char* name = nullptr;
        check(cuFuncGetName(&name, function), "the name of a CUDA kernel");
        kernels.try_emplace(name + sizeof("vqkv_") - 1, function);
      }
    }
    modules_ = std::move(modules);
    kernels_ = std::move(kernels);
  }

  Kernel& get(std::string_view name) {
    auto it = kernels_.find(name);
    if (it == kernels_.end()) {
      throw std::runtime_error(message("vqkv_ext", "kernel ", name, " is not in this build."));
    }
    return it->second;
  }

  /** The shared memory that a block of the current device may have. */
  uint32_t most_shared_bytes() {
    if (!most_shared_bytes_) {
      most_shared_bytes_ = static_cast<uint32_t>(
          device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                           "the shared memory of the CUDA device"));
    }
    return most_shared_bytes_;
  }

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  // by their name without the prefix
  using ByName = std::unordered_map<std::string, Kernel, Hash, std::equal_to<>>;

  std::atomic<uint32_t> most_shared_bytes_ = 0;
  std::vector<CUmodule> modules_;
  ByName kernels_;
};

/** Makes the device current and loads its kernels. */
Kernels& kernels(mx::cu::Device& device) {
  static std::mutex mutex;
  static std::map<int, Kernels> all;
  thread_local const mx::cu::Device* last = nullptr;
  thread_local Kernels* of_last = nullptr;
  device.make_current();
  if (last != &device) {
    std::lock_guard lock(mutex);
    auto& found = all[device.cuda_device()];
    found.load();
    of_last = &found;
    last = &device;
  }
  return *of_last;
}

// metal/compat/cuda.h: a kernel has one argument, the pointers to its buffers and then the params.
constexpr size_t kMostBuffers = 32;
struct Argument {
  alignas(void*) std::array<char, kMostBuffers * sizeof(void*) + Params::kMost> bytes;
};

Argument argument_of(const Launch& l) {
  Argument to;
  char* at = to.bytes.data();
  auto append = [&](const void* data, size_t n) {
    std::memcpy(at, data, n);
    at += n;
  };
  require(l.inputs.size() + l.outputs.size() <= kMostBuffers, "vqkv_ext", "kernel ",
          l.kernel.view(), " may have ", kMostBuffers, " buffers, but got ",
          l.inputs.size() + l.outputs.size(), ".");
  for (const auto* side : {&l.inputs, &l.outputs}) {
    for (const auto* a : *side) {
      // not data(), which would move the buffer to unified memory
      const void* buffer = a->size() ? mx::gpu_ptr<void>(*a) : nullptr;
      append(&buffer, sizeof(buffer));
    }
  }
  append(l.params.data(), l.params.size());
  return to;
}

/**
 * The primitive of MLX that gives an array memory of a stream's device and does no more when its
 * mask is empty; null if this MLX has none.
 */
std::shared_ptr<mx::UnaryPrimitive> device_memory(const mx::Stream& s) {
  const mx::array none(mx::Shape{0}, mx::bool_, nullptr, {});
  for (auto a = mx::masked_scatter(none, none, none, s); a.has_primitive(); a = a.inputs()[0]) {
    if (std::string(a.primitive().name()) == "MaskedScatter") {
      static_assert(std::is_base_of_v<mx::UnaryPrimitive, mx::MaskedScatter>);
      return std::static_pointer_cast<mx::UnaryPrimitive>(a.primitive_ptr());
    }
  }
  return nullptr;
}

}  // namespace

// mx::allocator::malloc gives unified memory, and moves there, with a copy that waits for the
// device, what MLX's own kernels have freed. The function they call is not exported.
void allocate_gpu(mx::array& a, const mx::Stream& s) {
  struct Memory {
    mx::Stream stream;
    std::shared_ptr<mx::UnaryPrimitive> primitive;
    std::vector<mx::array> inputs;
  };
  thread_local std::vector<Memory> known;
  auto it = std::find_if(known.begin(), known.end(), [&](auto& k) { return k.stream == s; });
  if (it == known.end()) {
    const mx::array none(mx::Shape{0}, mx::bool_, nullptr, {});
    it = known.insert(known.end(), {s, device_memory(s), {none, none, none}});
  }
  if (it->primitive && a.nbytes() > 0) {
    it->primitive->eval_gpu(it->inputs, a);
  } else {
    a.set_data(mx::allocator::malloc(a.nbytes()));
  }
}

const char* gpu_executor() {
  return "cuda";
}

std::string kernel_library() {
  if (mx::cu::is_available()) {
    kernels(mx::cu::device(mx::Device::gpu));
  }
  return "fatbin";
}

void run_gpu(const mx::Stream& s, std::span<const Launch> launches, Temporaries& temporaries) {
  allocate_all(temporaries, s);
  constexpr uint32_t kMaxGridYZ = 65535;
  auto& enc = mx::cu::get_command_encoder(s);
  for (const auto& l : launches) {
    require(l.grid[1] <= kMaxGridYZ && l.grid[2] <= kMaxGridYZ, "vqkv_ext", "kernel ",
            l.kernel.view(), " needs a grid of ", l.grid[0], " x ", l.grid[1], " x ", l.grid[2],
            " thread blocks, but CUDA allows ", kMaxGridYZ, " along the last two axes.");
    auto& all = kernels(enc.device());
    auto& kernel = all.get(l.kernel.view());
    uint32_t shared_bytes = 0, threads = l.threads, along = l.grid[0];
    if (l.cuda_shared_bytes > 0) {
      shared_bytes = std::min(l.cuda_shared_bytes, all.most_shared_bytes());
      kernel.allow(shared_bytes, l.kernel.view());
    }
    if (l.cuda_more_threads > 0 && kernel.most_threads() >= threads + l.cuda_more_threads) {
      threads += l.cuda_more_threads;
    }
    if (l.cuda_resident) {
      along = std::min(along, kernel.resident_blocks(threads, shared_bytes));
    }
    // Every input costs the graph a dependency and counts as memory that it holds. One that stands
    // in for what there is not is named many times.
    for (size_t i = 0; i < l.inputs.size(); ++i) {
      auto same = [&](const mx::array* other) {
        return other->data_shared_ptr() == l.inputs[i]->data_shared_ptr();
      };
      if (std::none_of(l.inputs.begin(), l.inputs.begin() + i, same)) {
        enc.set_input_array(*l.inputs[i]);
      }
    }
    for (const auto* a : l.outputs) {
      enc.set_output_array(*a);
    }
    auto bytes = argument_of(l);
    void* argument = &bytes;  // copied into the node
    enc.add_kernel_node_raw(kernel.function(), dim3(along, l.grid[1], l.grid[2]), dim3(threads),
                            dim3(), shared_bytes, &argument);
  }
  for (const auto& a : temporaries) {
    enc.add_temporary(a);
  }
}

}  // namespace vqkv::backend

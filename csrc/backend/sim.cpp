#include "backend/backend.h"

#include <algorithm>
#include <cstdlib>

#include "mlx/device.h"

#ifdef VQKV_SIM
#include "mlx/backend/cpu/encoder.h"
#include "simulator/simulator.h"
#endif

namespace vqkv::backend {

bool has_kernels() {
  static const bool gpu = std::string(gpu_executor()) != "none";
  return gpu || mx::default_device() != mx::Device::gpu;
}

void allocate(mx::array& a, const mx::Stream& s) {
  if (s.device == mx::Device::gpu) {
    allocate_gpu(a, s);
  } else {
    a.set_data(mx::allocator::malloc(a.nbytes()));
  }
}

#ifdef VQKV_SIM

bool has_simulator() {
  return true;
}

bool simulated() {
  const char* e = std::getenv("VQKV_EXECUTOR");
  return e && std::string(e) == "sim";
}

void run_simulated(const mx::Stream& s, std::span<const Launch> launches,
                   Temporaries& temporaries) {
  allocate_all(temporaries, s);
  // as a GPU that holds so many: threadgroups of larger grids go on to further parts of the work
  constexpr uint32_t kResident = 4;
  auto& enc = mx::cpu::get_command_encoder(s);
  for (const auto& l : launches) {
    auto grid = l.grid;
    if (l.cuda_resident) {
      grid[0] = std::min(grid[0], kResident);
    }
    std::vector<sim::Buffer> buffers;
    for (const auto* side : {&l.inputs, &l.outputs}) {
      for (const auto* a : *side) {
        // data<char>() is null for an array without elements; the kernel must not read it
        buffers.push_back({a->size() ? const_cast<char*>(a->data<char>()) : nullptr, a->nbytes()});
      }
    }
    enc.dispatch([kernel = l.kernel, buffers = std::move(buffers), params = l.params, grid,
                  threads = l.threads]() {
      sim::Request r{kernel.c_str(), buffers.data(), buffers.size(),
                     params.data(),  params.size(),  {grid[0], grid[1], grid[2]},
                     threads};
      sim::launch(r);
    });
  }
  enc.add_temporaries(std::vector<mx::array>(temporaries.begin(), temporaries.end()));
}

std::vector<std::string> simulator_kernels() {
  return sim::kernels();
}
std::vector<std::string> simulator_executed() {
  return sim::executed();
}

#else

bool has_simulator() {
  return false;
}

bool simulated() {
  const char* e = std::getenv("VQKV_EXECUTOR");
  if (e && std::string(e) == "sim") {
    throw std::runtime_error(
        "[vqkv_ext] VQKV_EXECUTOR=sim needs a development build (CMake option VQKV_SIM=ON).");
  }
  return false;
}

void run_simulated(const mx::Stream&, std::span<const Launch>, Temporaries&) {
  throw std::logic_error("[vqkv_ext] the simulator is not part of this build.");
}

std::vector<std::string> simulator_kernels() {
  return {};
}
std::vector<std::string> simulator_executed() {
  return {};
}

#endif

}  // namespace vqkv::backend

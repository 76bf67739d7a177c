// The simulator as a C library, for ctypes.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "../../csrc/simulator/simulator.h"

namespace {

std::string join(const std::vector<std::string>& names) {
  std::string s;
  for (const auto& n : names)
    s += n + "\n";
  return s;
}

}  // namespace

extern "C" {

/** Returns 0, or 1 with a message in `error`. */
int sim_launch(const char* kernel, void* const* data, const size_t* sizes, size_t n_buffers,
               const void* params, size_t params_size, const unsigned* grid, unsigned threads,
               int n_threads, int order, char* error, size_t error_size) {
  std::vector<vqkv::sim::Buffer> buffers;
  for (size_t i = 0; i < n_buffers; i++)
    buffers.push_back({data[i], sizes[i]});
  try {
    vqkv::sim::launch({kernel,
                       buffers.data(),
                       n_buffers,
                       params,
                       params_size,
                       {grid[0], grid[1], grid[2]},
                       threads},
                      n_threads, order);
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(error, error_size, "%s", e.what());
    return 1;
  }
}

/** One name a line; valid until the next call. */
const char* sim_kernels() {
  static std::string s;
  s = join(vqkv::sim::kernels());
  return s.c_str();
}
const char* sim_executed() {
  static std::string s;
  s = join(vqkv::sim::executed());
  return s.c_str();
}
}

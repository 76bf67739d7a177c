// Runs Metal kernels on the host, one fiber per simulated thread, and reports what a GPU would
// silently get wrong: barriers and simdgroup functions that only part of the threads reach, access
// outside buffers, writes to const buffers, too much threadgroup memory. What a kernel never wrote
// holds 0xff bytes (NaN). Races show as results that depend on the order of threads; where kernels
// are compiled with -fsanitize=thread (and all is linked without it), they are reported: races.h.
//
// Sources: csrc/simulator/*.cpp, C++17, with the threads library; kernels.cpp needs -fsigned-char
// (MSL's char) and -ffp-contract=off (so that only metal::fma fuses). Link them as objects: a
// static library would drop the kernels' registrations.
//
// Sanitizers: build everything with -fsanitize=address,undefined -fno-sanitize=vptr,function and,
// for Python, -shared-libasan with the runtime in LD_PRELOAD and ASAN_OPTIONS=detect_leaks=0:
// symbolize=0. Threadgroup arrays and buffers are then exact to the byte; asan.h has the rest.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace vqkv::sim {

struct Buffer {
  void* data;   // may be null if size is 0
  size_t size;  // bytes
};

struct Request {
  const char* kernel;
  const Buffer* buffers;
  size_t n_buffers;
  const void* params;
  size_t params_size;
  unsigned grid[3];  // threadgroups; nothing runs if one is 0
  unsigned threads;  // per threadgroup
};

/**
 * Runs a kernel and waits for it. It works on copies of the buffers; those it may write are copied
 * back afterwards, in order, so an output keeps its previous bytes where the kernel did not write.
 * May be called from any thread; calls take turns.
 *
 * n_threads: host threads, 0 for one per core (at most 8). order: of simulated threads, 0 forward,
 * 1 reverse, n > 1 random with this seed, negative for the environment variable VQKV_SIM_ORDER.
 *
 * Throws std::runtime_error with the report of the first fault; the outputs are then unspecified.
 */
void launch(const Request&, int n_threads = 0, int order = -1);

/** Names of all kernels. Throws std::runtime_error if two have the same name. */
std::vector<std::string> kernels();

/** Names of the kernels that have run in this process. */
std::vector<std::string> executed();

}  // namespace vqkv::sim

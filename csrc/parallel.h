// Threads for the native CPU kernels.
#pragma once

#include <cstdint>
#include <functional>

namespace vqkv {

/** Threads a kernel may use: VQKV_NUM_THREADS, else the cores this process may run on. */
int num_threads();

/**
 * Run body(i) for i in [0, n), on the calling thread and idle workers of one process-wide pool.
 * Returns when all are done; rethrows the first exception. Nested calls run serially.
 */
void parallel_for(int64_t n, const std::function<void(int64_t)>& body);

/** The instruction set the CPU kernels were chosen for: "avx512", "avx2", "baseline". */
const char* cpu_isa();

}  // namespace vqkv

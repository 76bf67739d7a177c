// One launch, shared by the host threads that carry it out.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "../../metal/compat/hooks.h"
#include "guarded_buffer.h"

namespace vqkv::sim {

struct Job {
  std::string kernel;
  Invoke invoke = nullptr;
  const void* params = nullptr;
  std::vector<GuardedBuffer> buffers;
  std::vector<void*> pointers;
  unsigned grid[3] = {0, 0, 0};
  unsigned threads = 0;
  int order = 0;

  std::atomic<uint64_t> next{0};  // threadgroup
  std::atomic<bool> failed{false};
  std::string error;  // of the first fault

  uint64_t threadgroups() const { return uint64_t(grid[0]) * grid[1] * grid[2]; }

  void fail(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failed)
      error = what;
    failed = true;
  }

 private:
  std::mutex mutex_;
};

}  // namespace vqkv::sim

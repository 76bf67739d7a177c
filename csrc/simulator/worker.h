// A host thread's share of a launch: runs threadgroups one at a time, their threads as fibers.
#pragma once

#include <setjmp.h>

#include <random>
#include <vector>

#include "fiber.h"
#include "job.h"
#include "races.h"

namespace vqkv::sim {

constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxThreads = 1024;  // per threadgroup, Metal's limit
#ifndef VQKV_SIM_THREADGROUP_MEMORY
#define VQKV_SIM_THREADGROUP_MEMORY (32 << 10)  // Metal's limit
#endif
constexpr size_t kMaxThreadgroupMemory = VQKV_SIM_THREADGROUP_MEMORY;

class Worker {
 public:
  Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /** Runs threadgroups of the job on the calling host thread until none is left or one failed. */
  void run(Job& job);

  /** The worker that runs on this host thread, or null. */
  static Worker* current();

  /** Called in a signal handler. Returns, after the report, only if the fault is not a kernel's. */
  void memory_fault(const void* address);

  // Called by kernels through hooks.h.
  Exchange& exchange(const void* value, size_t size, const char* operation, Site);
  void barrier(unsigned memory, const char* operation, Site);
  void simdgroup_barrier(unsigned memory, const char* operation, Site);
  void arrive(const void* gate, const char* operation, Site);
  void gate(bool (*open)(const void*, unsigned), const void* gate, unsigned round,
            const char* operation, Site);
  void* threadgroup_memory(const void* key, size_t size, size_t align, const char* name);
  unsigned lane() const { return thread_->tid % kSimdWidth; }
  unsigned threadgroups() const { return job_->grid[0]; }
  /** A thread reads or writes memory; called where accesses are seen. */
  void access(const void* address, size_t size, bool writes);

 private:
  enum class State : unsigned char { ready, in_simdgroup, in_threadgroup, at_gate, done };

  struct Thread {
    Fiber fiber;
    unsigned tid = 0;
    State state = State::done;
    const char* operation = "";
    Site site{"", 0, 0};
    unsigned memory = 0;                            // what the barrier it waits at orders
    bool (*open)(const void*, unsigned) = nullptr;  // what it waits for at a gate
    const void* gate = nullptr;                     // this one, or that it arrives at
    unsigned round = 0;
  };
  struct Simdgroup {
    Exchange exchanges[2];  // two, so that lanes may still read the last one
    int parity = 0;
    unsigned lanes = 0;
  };
  struct Array {
    const void* key;
    char* data;
    size_t size, allocated;
    const char* name;
  };

  static void thread_main();
  static bool same_point(const Thread& a, const Thread& b);
  static std::string point(const Thread& t);

  void run_threadgroup();
  void start_threads();
  bool advance_simdgroup(unsigned index);
  bool advance_to_barrier(const unsigned* turn, unsigned n);
  bool together(const Thread& a, const Thread& b);
  void resume(Thread& t);
  void wait(State state, const char* operation, Site site, unsigned memory = 0,
            const void* gate = nullptr);
  void poison_arrays();
  void check_arrays();
  void free_arrays();
  std::string where() const;
  void fail(const std::string& what);

  Job* job_ = nullptr;
  Context host_;
  Thread threads_[kMaxThreads];
  Simdgroup simdgroups_[kMaxThreads / kSimdWidth];
  Thread* thread_ = nullptr;  // the one that runs
  unsigned tgid_[3] = {0, 0, 0};
  std::vector<Array> arrays_;
  size_t array_bytes_ = 0;
  Races races_;
  std::minstd_rand random_;
  sigjmp_buf escape_;
};

}  // namespace vqkv::sim

// Stackful coroutines for the threads of a threadgroup.
#pragma once

#include <cstddef>

#if !defined(VQKV_SIM_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define VQKV_SIM_UCONTEXT  // slower by a system call per switch
#endif
#ifdef VQKV_SIM_UCONTEXT
#include <ucontext.h>
#endif

namespace vqkv::sim {

/** A suspended point of execution. */
struct Context {
#ifdef VQKV_SIM_UCONTEXT
  ucontext_t saved;
#else
  void* sp = nullptr;
#endif
  // for AddressSanitizer
  const void* stack = nullptr;
  size_t stack_size = 0;
  void* fake_stack = nullptr;
};

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  /**
   * The next resume() enters `entry`, which must call entered() first and never return. Fibers of
   * different `index` begin at different cache lines of their stacks.
   */
  void start(void (*entry)(), unsigned index, bool stack_is_clean);

  void resume(Context& host);
  void entered(Context& host);
  /** Back to the host; `last` if the fiber will not be resumed. */
  void suspend(Context& host, bool last = false);

  /** Is the address in the guard below the stack, where an overflow ends up? */
  bool overflowed(const void* address) const;

 private:
  Context context_;
  char* stack_ = nullptr;
};

}  // namespace vqkv::sim

// Turns a memory fault of a simulated thread into a report.
#pragma once

#include <signal.h>

#include <memory>

namespace vqkv::sim {

/** While it lives, memory faults of this process go to Worker::memory_fault first. */
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();
};

/** The stack for signal handlers of one host thread, since a fiber's own may have overflowed. */
class SignalStack {
 public:
  SignalStack();
  ~SignalStack();

 private:
  std::unique_ptr<char[]> memory_;
  stack_t previous_;
};

}  // namespace vqkv::sim

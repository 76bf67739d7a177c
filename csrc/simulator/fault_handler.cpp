#include "fault_handler.h"

#include "asan.h"
#include "worker.h"

namespace vqkv::sim {
namespace {

constexpr size_t kStack = 64 << 10;
constexpr int kSignals[] = {SIGSEGV, SIGBUS};  // Linux, macOS
struct sigaction previous[2];

void restore() {
  for (int i = 0; i < 2; i++)
    sigaction(kSignals[i], &previous[i], nullptr);
}

void on_fault(int, siginfo_t* info, void*) {
  if (Worker* w = Worker::current())
    w->memory_fault(info->si_addr);
  restore();  // not a kernel's: the instruction faults again and meets the previous handler
}

}  // namespace

// AddressSanitizer handles faults itself.
FaultHandler::FaultHandler() {
#ifndef VQKV_SIM_ASAN
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 2; i++)
    sigaction(kSignals[i], &action, &previous[i]);
#endif
}

FaultHandler::~FaultHandler() {
#ifndef VQKV_SIM_ASAN
  restore();
#endif
}

SignalStack::SignalStack() : memory_(new char[kStack]), previous_{} {
#ifndef VQKV_SIM_ASAN
  stack_t s = {};
  s.ss_sp = memory_.get();
  s.ss_size = kStack;
  sigaltstack(&s, &previous_);
#endif
}

SignalStack::~SignalStack() {
#ifndef VQKV_SIM_ASAN
  sigaltstack(&previous_, nullptr);
#endif
}

}  // namespace vqkv::sim

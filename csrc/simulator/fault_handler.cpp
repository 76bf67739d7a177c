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
  if (kAsan)
    return;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 2; i++)
    sigaction(kSignals[i], &action, &previous[i]);
}

FaultHandler::~FaultHandler() {
  if (kAsan)
    return;
  restore();
}

SignalStack::SignalStack() : memory_(new char[kStack]), previous_{} {
  if (kAsan)
    return;
  stack_t s = {};
  s.ss_sp = memory_.get();
  s.ss_size = kStack;
  sigaltstack(&s, &previous_);
}

SignalStack::~SignalStack() {
  if (kAsan)
    return;
  sigaltstack(&previous_, nullptr);
}

}  // namespace vqkv::sim

#include "fiber.h"

#include <sys/mman.h>

#include <new>

#include "asan.h"

namespace vqkv::sim {
namespace {

#ifdef VQKV_SIM_ASAN
constexpr size_t kStack = 512 << 10;  // red zones and unoptimised frames
#else
constexpr size_t kStack = 128 << 10;
#endif
// What the frame of a fiber's entry function may leave poisoned, since it never returns.
[[maybe_unused]] constexpr size_t kEntryFrame = 16 << 10;

// Stacks that began at the same offset would share the same few sets of the cache.
constexpr unsigned kColours = 64;
constexpr size_t kColour = 192;

// Far larger than a page: a frame with a large array may start beyond one page.
constexpr size_t kGuard = 512 << 10;

}  // namespace

#ifdef VQKV_SIM_UCONTEXT

static void prepare(Context& c, char* stack, size_t size, void (*entry)()) {
  getcontext(&c.saved);
  c.saved.uc_stack.ss_sp = stack;
  c.saved.uc_stack.ss_size = size;
  c.saved.uc_link = nullptr;
  makecontext(&c.saved, entry, 0);
}
static void switch_stacks(Context& from, Context& to) {
  swapcontext(&from.saved, &to.saved);
}

#else

// Saves the callee-saved registers, stores the stack pointer and continues on the other stack.
extern "C" void vqkv_sim_switch(void** save_sp, void* load_sp) asm("vqkv_sim_switch");

#if defined(__x86_64__)
asm(R"(
.text
.globl vqkv_sim_switch
vqkv_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

static void prepare(Context& c, char* stack, size_t size, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(stack + size);
  *--sp = nullptr;  // in place of a return address: the alignment of a called function
  *--sp = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++)
    *--sp = nullptr;
  c.sp = sp;
}
#else
asm(R"(
.text
.globl vqkv_sim_switch
.p2align 2
vqkv_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");

static void prepare(Context& c, char* stack, size_t size, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(stack + size) - 20;
  for (int i = 0; i < 20; i++)
    sp[i] = nullptr;
  sp[11] = reinterpret_cast<void*>(entry);  // x30, where ret goes
  c.sp = sp;
}
#endif

static void switch_stacks(Context& from, Context& to) {
  vqkv_sim_switch(&from.sp, to.sp);
}

#endif

static void switch_context(Context& from, Context& to, bool last) {
#ifdef VQKV_SIM_ASAN
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.stack_size);
#endif
  (void)last;
  switch_stacks(from, to);
#ifdef VQKV_SIM_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

Fiber::~Fiber() {
  if (stack_)
    munmap(stack_ - kGuard, kStack + kGuard);
}

void Fiber::start(void (*entry)(), unsigned index, bool stack_is_clean) {
  if (!stack_) {
    void* m = mmap(nullptr, kStack + kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (m == MAP_FAILED)
      throw std::bad_alloc();
    stack_ = static_cast<char*>(m) + kGuard;
    mprotect(stack_, kStack, PROT_READ | PROT_WRITE);
  }
  context_.stack = stack_;
  context_.stack_size = kStack;
#ifdef VQKV_SIM_ASAN
  const size_t dirty = stack_is_clean ? kEntryFrame : kStack;
  __asan_unpoison_memory_region(stack_ + kStack - dirty, dirty);
#endif
  (void)stack_is_clean;
  prepare(context_, stack_, kStack - index % kColours * kColour, entry);
}

void Fiber::resume(Context& host) {
  switch_context(host, context_, false);
}

void Fiber::entered(Context& host) {
#ifdef VQKV_SIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &host.stack, &host.stack_size);
#endif
  (void)host;
}

void Fiber::suspend(Context& host, bool last) {
  switch_context(context_, host, last);
}

bool Fiber::overflowed(const void* address) const {
  const char* a = static_cast<const char*>(address);
  return stack_ && a >= stack_ - kGuard && a < stack_;
}

}  // namespace vqkv::sim

#include "worker.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "asan.h"

namespace vqkv::sim {
namespace {

thread_local Worker* current_worker = nullptr;

constexpr size_t kCanary = 64;  // behind a threadgroup array
constexpr int kPoison = 0xff;

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

}  // namespace

// Not inlined: the address of a thread_local must not outlive a switch in a register.
__attribute__((noinline)) Worker* Worker::current() {
  return current_worker;
}

std::string Worker::where() const {
  return "threadgroup (" + std::to_string(tgid_[0]) + "," + std::to_string(tgid_[1]) + "," +
         std::to_string(tgid_[2]) + ")";
}

void Worker::fail(const std::string& what) {
  job_->fail(what);
}

// ---- the kernel's side: code that runs on a fiber ----

void Worker::thread_main() {
  Worker* w = current();
  Thread* t = w->thread_;
  t->fiber.entered(w->host_);
  const Builtins builtins{
      {w->tgid_[0], w->tgid_[1], w->tgid_[2]}, t->tid, t->tid % kSimdWidth, t->tid / kSimdWidth};
  w->job_->invoke(w->job_->pointers.data(), w->job_->params, builtins);
  t->state = State::done;
  t->operation = "the end of the kernel";
  t->site = Site{"", 0, 0};
  t->fiber.suspend(w->host_, true);
  std::abort();
}

void Worker::wait(State state, const char* operation, Site site, unsigned memory,
                  const void* gate) {
  Thread* t = thread_;
  t->state = state;
  t->operation = operation;
  t->site = site;
  t->memory = memory;
  t->gate = gate;
  t->fiber.suspend(host_);
}

Exchange& Worker::exchange(const void* value, size_t size, const char* operation, Site site) {
  Simdgroup& s = simdgroups_[thread_->tid / kSimdWidth];
  Exchange& e = s.exchanges[s.parity];
  std::memcpy(e.posted[lane()], value, size);
  wait(State::in_simdgroup, operation, site);
  return e;
}

void Worker::barrier(unsigned memory, const char* operation, Site site) {
  wait(State::in_threadgroup, operation, site, memory);
}

void Worker::simdgroup_barrier(unsigned memory, const char* operation, Site site) {
  wait(State::in_simdgroup, operation, site, memory);
}

void Worker::arrive(const void* gate, const char* operation, Site site) {
  wait(State::in_simdgroup, operation, site, 0, gate);
}

void Worker::gate(bool (*open)(const void*, unsigned), const void* gate, unsigned round,
                  const char* operation, Site site) {
  thread_->open = open;
  thread_->round = round;
  wait(State::at_gate, operation, site, 0, gate);
}

void Worker::access(const void* address, size_t size, bool writes) {
  if (!thread_ || job_->failed.load(std::memory_order_relaxed))
    return;
  std::string race;
  if (races_.access(thread_->tid, address, size, writes, race)) {
    fail("race in " + where() + ": thread " + std::to_string(thread_->tid) + ", after " +
         point(*thread_) + ", " + race);
  }
}

void* Worker::threadgroup_memory(const void* key, size_t size, size_t align, const char* name) {
  for (const Array& a : arrays_) {
    if (a.key == key)
      return a.data;
  }
  align = std::max<size_t>(align, 16);
  const size_t allocated = (size + kCanary + align - 1) / align * align;
  Array a{key, static_cast<char*>(std::aligned_alloc(align, allocated)), size, allocated, name};
  if (!a.data)
    std::abort();  // an exception cannot leave a fiber
  std::memset(a.data, kPoison, allocated);
#ifdef VQKV_SIM_ASAN
  __asan_poison_memory_region(a.data + size, allocated - size);
#endif
  arrays_.push_back(a);
  if (accesses_are_seen())
    races_.watch_array(a.data, size, name);
  array_bytes_ += size;
  if (array_bytes_ > kMaxThreadgroupMemory) {
    fail("threadgroup memory of " + std::to_string(array_bytes_) + " bytes exceeds " +
         std::to_string(kMaxThreadgroupMemory) + " (at " + name + ")");
  }
  return a.data;
}

Exchange& exchange(const void* value, size_t size, const char* operation, Site site) {
  return Worker::current()->exchange(value, size, operation, site);
}
void barrier(unsigned memory, const char* operation, Site site) {
  Worker::current()->barrier(memory, operation, site);
}
void simdgroup_barrier(unsigned memory, const char* operation, Site site) {
  Worker::current()->simdgroup_barrier(memory, operation, site);
}
void arrive(const void* gate, const char* operation, Site site) {
  Worker::current()->arrive(gate, operation, site);
}
void gate(bool (*open)(const void*, unsigned), const void* gate, unsigned round,
          const char* operation, Site site) {
  Worker::current()->gate(open, gate, round, operation, site);
}
unsigned lane() {
  return Worker::current()->lane();
}
unsigned threadgroups() {
  return Worker::current()->threadgroups();
}
void* threadgroup_memory(const void* key, size_t size, size_t align, const char* name) {
  return Worker::current()->threadgroup_memory(key, size, align, name);
}

// ---- the scheduler ----

void Worker::resume(Thread& t) {
  thread_ = &t;
  t.fiber.resume(host_);
  thread_ = nullptr;
}

bool Worker::same_point(const Thread& a, const Thread& b) {
  return a.state == b.state && a.site.line == b.site.line && a.site.column == b.site.column &&
         (a.operation == b.operation || !std::strcmp(a.operation, b.operation)) &&
         (a.site.file == b.site.file || !std::strcmp(a.site.file, b.site.file));
}

std::string Worker::point(const Thread& t) {
  std::string s = t.operation;
  if (t.site.line)
    s += std::string(" ") + base_name(t.site.file) + ":" + std::to_string(t.site.line);
  return s;
}

bool Worker::together(const Thread& a, const Thread& b) {
  if (same_point(a, b))
    return true;
  auto at = [](const Thread& t) { return "thread " + std::to_string(t.tid) + " at " + point(t); };
  fail("divergence in " + where() + ": " + at(a) + ", " + at(b));
  return false;
}

void Worker::start_threads() {
  for (unsigned i = 0; i < job_->threads; i++) {
    Thread& t = threads_[i];
    t.tid = i;
    t.fiber.start(thread_main, i, t.state == State::done);
    t.state = State::ready;
    t.operation = "the start";
    t.site = Site{"", 0, 0};
  }
  for (unsigned s = 0; s * kSimdWidth < job_->threads; s++) {
    simdgroups_[s].lanes = std::min(kSimdWidth, job_->threads - s * kSimdWidth);
  }
}

// Runs a simdgroup until its lanes wait for others or are done.
bool Worker::advance_simdgroup(unsigned index) {
  Simdgroup& s = simdgroups_[index];
  Thread* lanes = threads_ + index * kSimdWidth;
  for (;;) {
    // lane = start + stride * i modulo the width, a permutation since the stride is odd
    unsigned start = 0, stride = 1;
    if (job_->order == 1) {
      start = stride = kSimdWidth - 1;
    } else if (job_->order > 1) {
      start = unsigned(random_());
      stride = unsigned(random_()) | 1u;
    }
    for (unsigned i = 0; i < kSimdWidth; i++) {
      const unsigned l = (start + stride * i) % kSimdWidth;
      if (l < s.lanes && lanes[l].state == State::ready)
        resume(lanes[l]);
    }
    if (job_->failed.load(std::memory_order_relaxed))
      return false;
    for (unsigned i = 1; i < s.lanes; i++) {
      if (!together(lanes[0], lanes[i]))
        return false;
    }
    if (lanes[0].state != State::in_simdgroup)
      return true;
    if (lanes[0].gate)
      races_.arrive(index, lanes[0].gate);
    races_.simdgroup_barrier(index, lanes[0].memory);
    s.exchanges[s.parity].lanes = s.lanes;
    s.exchanges[s.parity].has_result = false;
    s.parity ^= 1;
    for (unsigned i = 0; i < s.lanes; i++)
      lanes[i].state = State::ready;
  }
}

// Runs the simdgroups, in this order, until all wait for the whole threadgroup or are done.
bool Worker::advance_to_barrier(const unsigned* turn, unsigned n) {
  for (bool waiting = true; waiting;) {
    bool moved = false;
    waiting = false;
    for (unsigned k = 0; k < n; k++) {
      Thread* lanes = threads_ + turn[k] * kSimdWidth;
      if (lanes[0].state == State::at_gate && lanes[0].open(lanes[0].gate, lanes[0].round)) {
        for (unsigned i = 0; i < simdgroups_[turn[k]].lanes; i++)
          lanes[i].state = State::ready;
        races_.pass(turn[k], lanes[0].gate);
      }
      if (lanes[0].state == State::ready) {
        if (!advance_simdgroup(turn[k]))
          return false;
        moved = true;
      }
      waiting |= lanes[0].state == State::at_gate;
    }
    if (waiting && !moved) {
      fail("deadlock in " + where() + ": all simdgroups wait for others");
      return false;
    }
  }
  return true;
}

void Worker::run_threadgroup() {
  const unsigned n = (job_->threads + kSimdWidth - 1) / kSimdWidth;
  poison_arrays();
  races_.begin_threadgroup(n);
  start_threads();
  random_.seed(unsigned(job_->order) * 7919u + tgid_[0] + 31u * tgid_[1] + 961u * tgid_[2]);
  unsigned turn[kMaxThreads / kSimdWidth];
  std::iota(turn, turn + n, 0u);
  if (job_->order == 1)
    std::reverse(turn, turn + n);
  for (;;) {
    if (job_->order > 1)
      std::shuffle(turn, turn + n, random_);
    if (!advance_to_barrier(turn, n))
      return;
    for (unsigned k = 1; k < n; k++) {
      if (!together(threads_[0], threads_[k * kSimdWidth]))
        return;
    }
    if (threads_[0].state == State::done)
      break;
    races_.barrier(threads_[0].memory);
    for (unsigned i = 0; i < job_->threads; i++)
      threads_[i].state = State::ready;
  }
  check_arrays();
}

void Worker::run(Job& job) {
  job_ = &job;
  current_worker = this;
  const uint64_t total = job.threadgroups();
  if (accesses_are_seen()) {
    for (size_t i = 0; i < job.buffers.size(); i++) {
      if (job.buffers[i].writable())
        races_.watch_buffer(job.buffers[i].data(), job.buffers[i].size(), i);
    }
  }
  if (!sigsetjmp(escape_, 1)) {  // memory_fault() jumps back here
    while (!job.failed.load(std::memory_order_relaxed)) {
      uint64_t i = job.next++;
      if (i >= total)
        break;
      if (job.order == 1)
        i = total - 1 - i;
      tgid_[0] = unsigned(i % job.grid[0]);
      tgid_[1] = unsigned(i / job.grid[0] % job.grid[1]);
      tgid_[2] = unsigned(i / job.grid[0] / job.grid[1]);
      run_threadgroup();
    }
  }
  free_arrays();
  thread_ = nullptr;
  current_worker = nullptr;
  job_ = nullptr;
}

// ---- memory ----

void Worker::poison_arrays() {
  for (const Array& a : arrays_)
    std::memset(a.data, kPoison, a.size);
}

void Worker::check_arrays() {
#ifndef VQKV_SIM_ASAN
  for (const Array& a : arrays_) {
    for (size_t i = a.size; i < a.allocated; i++) {
      if (static_cast<unsigned char>(a.data[i]) != kPoison) {
        fail(where() + " wrote past the end of threadgroup array " + a.name);
        return;
      }
    }
  }
#endif
}

void Worker::free_arrays() {
  for (const Array& a : arrays_) {
#ifdef VQKV_SIM_ASAN
    __asan_unpoison_memory_region(a.data, a.allocated);
#endif
    std::free(a.data);
  }
  arrays_.clear();
  races_.clear();
  array_bytes_ = 0;
}

void Worker::memory_fault(const void* address) {
  if (!job_ || !thread_)
    return;
  const std::string who = where() + " thread " + std::to_string(thread_->tid);
  for (size_t i = 0; i < job_->buffers.size(); i++) {
    const GuardedBuffer& b = job_->buffers[i];
    if (b.covers(address)) {
      const auto byte = static_cast<const char*>(address) - b.data();
      fail((b.contains(address) ? "write to const buffer " : "out-of-bounds access to buffer ") +
           std::to_string(i) + " at byte " + std::to_string(byte) + " of " +
           std::to_string(b.size()) + ", " + who);
      siglongjmp(escape_, 1);
    }
  }
  if (thread_->fiber.overflowed(address)) {
    fail("stack overflow, " + who + ": the kernel's arrays do not fit a simulated thread's stack");
    siglongjmp(escape_, 1);
  }
}

}  // namespace vqkv::sim

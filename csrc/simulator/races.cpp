#include "races.h"

#include <algorithm>

#include "worker.h"

namespace vqkv::sim {
namespace {

bool seen = false;

}  // namespace

bool accesses_are_seen() {
  return seen;
}

void Races::clear() {
  arrays_.clear();
  buffers_.clear();
  gates_.clear();
  pages_.reset();
  group_ = 0;
}

void Races::watch(const char* data, size_t size) {
  for (size_t at = 0; at < size; at += size_t{1} << kPageBits)
    pages_.set(page(data + at));
  if (size)
    pages_.set(page(data + size - 1));
}

void Races::watch_array(const void* data, size_t size, const char* name) {
  arrays_.push_back({static_cast<const char*>(data), size, std::string("threadgroup array ") + name,
                     std::vector<ArrayByte>(size), std::vector<Read>(size * simdgroups_)});
  watch(arrays_.back().data, size);
}

void Races::watch_buffer(const void* data, size_t size, size_t index) {
  buffers_.push_back({static_cast<const char*>(data), size, "buffer " + std::to_string(index),
                      std::vector<BufferByte>(size)});
  watch(buffers_.back().data, size);
}

void Races::begin_threadgroup(unsigned simdgroups) {
  simdgroups_ = simdgroups;
  group_++;
  device_barriers_ = 0;
  gates_.clear();
  barrier(kThreadgroupMemory);  // after the threadgroups before
}

void Races::join(Clocks& known, const Clocks& more) const {
  for (unsigned s = 0; s < simdgroups_; s++)
    known[s] = std::max(known[s], more[s]);
}

void Races::barrier(unsigned memory) {
  if (memory & kDeviceMemory)
    device_barriers_++;
  if (!(memory & kThreadgroupMemory))
    return;
  Clocks all{};
  for (unsigned s = 0; s < simdgroups_; s++)
    join(all, clocks_[s]);
  for (unsigned s = 0; s < simdgroups_; s++) {
    clocks_[s] = all;
    clocks_[s][s]++;
  }
}

void Races::simdgroup_barrier(unsigned simdgroup, unsigned memory) {
  if (memory & kThreadgroupMemory)
    clocks_[simdgroup][simdgroup]++;
}

void Races::arrive(unsigned simdgroup, const void* gate) {
  join(gates_[gate], clocks_[simdgroup]);
  clocks_[simdgroup][simdgroup]++;
}

void Races::pass(unsigned simdgroup, const void* gate) {
  join(clocks_[simdgroup], gates_[gate]);
}

// Whether what thread `earlier` did at its simdgroup's count `at` comes before what `tid` does now.
bool Races::ordered(unsigned earlier, Clock at, unsigned tid) const {
  const unsigned s = earlier / kSimdWidth, now = tid / kSimdWidth;
  return earlier == tid || (s == now ? at < clocks_[now][now] : at <= clocks_[now][s]);
}

bool Races::race(Array& a, size_t byte, unsigned tid, bool writes, Other& other) {
  ArrayByte& b = a.bytes[byte];
  Read* reads = &a.reads[byte * simdgroups_];
  const unsigned s = tid / kSimdWidth;
  const Clock now = clocks_[s][s];
  const bool again = (b.readers >> s & 1) && reads[s].at == now;
  if (!writes && again && (reads[s].tid == tid || reads[s].tid == kMany))
    return false;
  bool found = b.written && !ordered(b.writer, b.written, tid);
  if (found)
    other = {b.writer, group_, true};
  if (!writes) {
    reads[s] = {now, again ? kMany : static_cast<uint16_t>(tid)};
    b.readers |= 1u << s;
    return found;
  }
  for (unsigned r = 0; !found && b.readers >> r; r++) {
    if (!(b.readers >> r & 1))
      continue;
    found = r == s ? reads[r].at == now && reads[r].tid != tid : reads[r].at > clocks_[s][r];
    if (found)
      other = {reads[r].tid, group_, false};
  }
  b = {now, 0, static_cast<uint16_t>(tid)};
  return found;
}

bool Races::race(Buffer& buffer, size_t byte, unsigned tid, bool writes, Other& other) {
  BufferByte& b = buffer.bytes[byte];
  auto before = [&](uint32_t group, uint16_t earlier, uint16_t at) {
    return group == 0 || (group == group_ && (earlier == tid || at < device_barriers_));
  };
  const bool written = before(b.writing_group, b.writer, b.written_at);
  const bool read = before(b.reading_group, b.reader, b.read_at);
  const bool found = !written || (writes && !read);
  if (found)
    other =
        written ? Other{b.reader, b.reading_group, false} : Other{b.writer, b.writing_group, true};
  if (writes) {
    b.writing_group = group_;
    b.writer = static_cast<uint16_t>(tid);
    b.written_at = device_barriers_;
  } else {
    b.reader = read ? static_cast<uint16_t>(tid) : kMany;
    b.reading_group = read || b.reading_group == group_ ? group_ : kManyGroups;
    b.read_at = device_barriers_;
  }
  return found;
}

template <typename Memory>
bool Races::access(Memory& m, size_t first, size_t size, unsigned tid, bool writes,
                   std::string& report) {
  Other other;
  for (size_t i = first; i < std::min(first + size, m.size); i++) {
    if (!race(m, i, tid, writes, other))
      continue;
    report = std::string(writes ? "writes" : "reads") + " byte " + std::to_string(i) + " of " +
             m.name + ", which " +
             (other.tid == kMany ? "other threads" : "thread " + std::to_string(other.tid)) +
             (other.group == group_ ? "" : " of another threadgroup") +
             (other.wrote ? " wrote" : " read");
    return true;
  }
  return false;
}

bool Races::access(unsigned tid, const void* address, size_t size, bool writes,
                   std::string& report) {
  if (!pages_[page(address)])
    return false;
  const char* at = static_cast<const char*>(address);
  auto holds = [&](const auto& m) { return at >= m.data && at < m.data + m.size; };
  for (auto& a : arrays_) {
    if (holds(a))
      return access(a, at - a.data, size, tid, writes, report);
  }
  for (auto& b : buffers_) {
    if (holds(b))
      return access(b, at - b.data, size, tid, writes, report);
  }
  return false;
}

}  // namespace vqkv::sim

// ---- what code compiled with -fsanitize=thread calls ----

namespace {
void note(const void* address, size_t size, bool writes) {
  if (auto* worker = vqkv::sim::Worker::current())
    worker->access(address, size, writes);
}
}  // namespace

#define VQKV_ACCESSES(n)                    \
  void __tsan_read##n(void* a) {            \
    note(a, n, false);                      \
  }                                         \
  void __tsan_write##n(void* a) {           \
    note(a, n, true);                       \
  }                                         \
  void __tsan_unaligned_read##n(void* a) {  \
    note(a, n, false);                      \
  }                                         \
  void __tsan_unaligned_write##n(void* a) { \
    note(a, n, true);                       \
  }

extern "C" {
void __tsan_init() {
  vqkv::sim::seen = true;
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
VQKV_ACCESSES(1)
VQKV_ACCESSES(2)
VQKV_ACCESSES(4)
VQKV_ACCESSES(8)
VQKV_ACCESSES(16)
void __tsan_read_range(void* a, unsigned long n) {
  note(a, n, false);
}
void __tsan_write_range(void* a, unsigned long n) {
  note(a, n, true);
}
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  note(from, n, false);
  note(to, n, true);
  return __builtin_memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  note(to, n, true);
  return __builtin_memset(to, value, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  note(from, n, false);
  note(to, n, true);
  return __builtin_memmove(to, from, n);
}
}

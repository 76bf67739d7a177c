#include "guarded_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "asan.h"

namespace vqkv::sim {
namespace {

constexpr size_t kAlign = 16;  // vector loads need it
[[maybe_unused]] constexpr size_t kGuard = 1 << 20;
[[maybe_unused]] constexpr char kPoison = static_cast<char>(0xff);

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

}  // namespace

GuardedBuffer::GuardedBuffer(const void* source, size_t size, bool writable)
    : size_(size), writable_(writable) {
#ifdef VQKV_SIM_ASAN
  map_size_ = round_up(size, kAlign) + kAlign;
  map_ = data_ = static_cast<char*>(std::aligned_alloc(kAlign, map_size_));
  if (!map_)
    throw std::bad_alloc();
  __asan_poison_memory_region(data_ + size, map_size_ - size);
  if (size)
    std::memcpy(data_, source, size);
#else
  const size_t body = round_up(size, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  map_size_ = body + 2 * kGuard;
  void* m = mmap(nullptr, map_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED)
    throw std::bad_alloc();
  map_ = static_cast<char*>(m);
  char* begin = map_ + kGuard;
  data_ = begin + (body - size) / kAlign * kAlign;  // ends where the guard begins
  if (size) {
    mprotect(begin, body, PROT_READ | PROT_WRITE);
    std::memset(begin, kPoison, static_cast<size_t>(data_ - begin));
    std::memcpy(data_, source, size);
    std::memset(data_ + size, kPoison, static_cast<size_t>(begin + body - data_) - size);
    if (!writable)
      mprotect(begin, body, PROT_READ);
  }
#endif
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept
    : map_(other.map_),
      map_size_(other.map_size_),
      data_(other.data_),
      size_(other.size_),
      writable_(other.writable_) {
  other.map_ = nullptr;
}

GuardedBuffer::~GuardedBuffer() {
  if (!map_)
    return;
#ifdef VQKV_SIM_ASAN
  __asan_unpoison_memory_region(map_, map_size_);
  std::free(map_);
#else
  munmap(map_, map_size_);
#endif
}

bool GuardedBuffer::covers(const void* address) const {
  const char* a = static_cast<const char*>(address);
  return a >= map_ && a < map_ + map_size_;
}

bool GuardedBuffer::contains(const void* address) const {
  const char* a = static_cast<const char*>(address);
  return a >= data_ && a < data_ + size_;
}

bool GuardedBuffer::intact() const {
#ifndef VQKV_SIM_ASAN
  if (!size_)
    return true;
  for (const char* p = map_ + kGuard; p < data_; p++) {
    if (*p != kPoison)
      return false;
  }
  for (const char* p = data_ + size_; p < map_ + map_size_ - kGuard; p++) {
    if (*p != kPoison)
      return false;
  }
#endif
  return true;
}

}  // namespace vqkv::sim

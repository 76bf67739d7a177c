// A kernel's copy of a buffer, with inaccessible memory on both sides.
#pragma once

#include <cstddef>

namespace vqkv::sim {

class GuardedBuffer {
 public:
  GuardedBuffer(const void* source, size_t size, bool writable);
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  ~GuardedBuffer();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  bool writable() const { return writable_; }

  /** Is the address in the buffer or in the memory that guards it? */
  bool covers(const void* address) const;
  bool contains(const void* address) const;

  /** False if a write went past an end by less than the alignment, where no guard page stops it. */
  bool intact() const;

 private:
  char* map_;
  size_t map_size_;
  char* data_;
  size_t size_;
  bool writable_;
};

}  // namespace vqkv::sim

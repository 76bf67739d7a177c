// Finds races: two threads of a launch reach a byte of threadgroup memory or of a buffer that the
// kernel may write, one of them writes, and neither a barrier nor a gate orders the two. Simdgroup
// functions order no memory, a barrier only the memory that its flags name.
//
// Accesses are seen in kernels compiled with -fsanitize=thread and linked without: races.cpp has
// the functions that such code calls.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../../metal/compat/hooks.h"

namespace vqkv::sim {

/** True if this process has kernels whose accesses are seen. They run on one host thread. */
bool accesses_are_seen();

/** The accesses of a launch, whose threadgroups run one after the other. */
class Races {
 public:
  /** Nothing is watched any more. */
  void clear();
  /** Of a threadgroup that has begun. */
  void watch_array(const void* data, size_t size, const char* name);
  void watch_buffer(const void* data, size_t size, size_t index);

  void begin_threadgroup(unsigned simdgroups);
  void barrier(unsigned memory);
  void simdgroup_barrier(unsigned simdgroup, unsigned memory);
  void arrive(unsigned simdgroup, const void* gate);
  void pass(unsigned simdgroup, const void* gate);

  /** Thread `tid` reads or writes; true, and what is wrong with it, if that is a race. */
  bool access(unsigned tid, const void* address, size_t size, bool writes, std::string& report);

 private:
  static constexpr unsigned kMost = 32;  // simdgroups
  using Clock = uint32_t;
  // what a simdgroup has seen of each; an access is known by its own count, which goes on at each
  // barrier and gate
  using Clocks = std::array<Clock, kMost>;

  static constexpr uint16_t kMany = 0xffff;  // threads
  static constexpr uint32_t kManyGroups = 0xffffffff;
  struct Read {
    Clock at;
    uint16_t tid;
  };
  struct ArrayByte {
    Clock written = 0;     // 0: never
    uint32_t readers = 0;  // simdgroups that read it since
    uint16_t writer = 0;
  };
  struct BufferByte {
    uint32_t writing_group = 0, reading_group = 0;  // number of the threadgroup, 0: none
    uint16_t writer = 0, reader = 0;
    uint16_t written_at = 0, read_at = 0;  // device barriers of the threadgroup before
  };
  struct Array {
    const char* data;
    size_t size;
    std::string name;
    std::vector<ArrayByte> bytes;
    std::vector<Read> reads;  // [bytes, simdgroups of the launch]
  };
  struct Buffer {
    const char* data;
    size_t size;
    std::string name;
    std::vector<BufferByte> bytes;
  };

  // What an access races with.
  struct Other {
    unsigned tid;
    uint32_t group;
    bool wrote;
  };
  static constexpr size_t kPageBits = 12, kPages = 4096;
  static size_t page(const void* address) {
    return (reinterpret_cast<uintptr_t>(address) >> kPageBits) % kPages;
  }

  void watch(const char* data, size_t size);
  void join(Clocks& known, const Clocks& more) const;
  bool race(Array& a, size_t byte, unsigned tid, bool writes, Other& other);
  bool race(Buffer& b, size_t byte, unsigned tid, bool writes, Other& other);
  template <typename Memory>
  bool access(Memory& m, size_t first, size_t size, unsigned tid, bool writes, std::string& report);
  bool ordered(unsigned earlier, Clock at, unsigned tid) const;

  unsigned simdgroups_ = 0;
  std::array<Clocks, kMost> clocks_{};
  std::map<const void*, Clocks> gates_;
  uint32_t group_ = 0;  // threadgroups begun
  uint16_t device_barriers_ = 0;
  std::vector<Array> arrays_;
  std::vector<Buffer> buffers_;
  std::bitset<kPages> pages_;  // where there is watched memory, by page()
};

}  // namespace vqkv::sim

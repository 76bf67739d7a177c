// What a kernel compiled for the simulator calls; csrc/simulator implements it. Plain C++: no MSL
// names or macros here.
#pragma once

#include <cstddef>

#include "bind.h"

namespace vqkv::sim {

struct Builtins {
  unsigned tgid[3];
  unsigned tid, lane, sg;
};

/** Runs one thread of a kernel. */
using Invoke = void (*)(void* const* buffers, const void* params, const Builtins&);

struct Registrar {
  Registrar(const char* name, Invoke, KernelInfo);
};

/** Where a barrier or simdgroup function was called. */
struct Site {
  const char* file;
  int line, column;

  // As a default argument of another function these built-ins name that function's caller.
#if defined(__clang__)
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                   int column = __builtin_COLUMN()) {
    return {file, line, column};
  }
#else
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line, 0};
  }
#endif
};

using Slot = unsigned char[16];

/**
 * Posts this lane's value (at most 16 bytes) and waits until the whole simdgroup has. Returns what
 * each lane posted, valid until the next but one exchange.
 */
const Slot* exchange(const void* value, size_t size, const char* operation, Site);
unsigned lanes();
unsigned lane();
void barrier(const char* operation, Site);

/** The array of this threadgroup that `key` stands for, full of 0xff bytes at first. */
void* threadgroup_memory(const void* key, size_t size, size_t align, const char* name);

}  // namespace vqkv::sim

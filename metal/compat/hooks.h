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

/** What the lanes of a simdgroup posted. */
struct Exchange {
  alignas(16) unsigned char posted[32][16];
  unsigned lanes;
  // A reduction is computed by the first lane to come and kept here for the others.
  bool has_result;
  alignas(16) unsigned char result[16];
};

/**
 * Posts this lane's value (at most 16 bytes) and waits until the whole simdgroup has. The result is
 * valid until the next but one exchange.
 */
Exchange& exchange(const void* value, size_t size, const char* operation, Site);
unsigned lane();
/** Of the grid, along its first axis. */
unsigned threadgroups();

/** What a barrier orders, of the values of MSL's mem_flags. */
enum Memory : unsigned { kDeviceMemory = 1, kThreadgroupMemory = 2 };
void barrier(unsigned memory, const char* operation, Site);
void simdgroup_barrier(unsigned memory, const char* operation, Site);

/** Waits until open(gate, round), which only what other simdgroups do can change. */
void gate(bool (*open)(const void* gate, unsigned round), const void* gate, unsigned round,
          const char* operation, Site);
/** A rendezvous of the simdgroup; what it did before comes before what follows the gate. */
void arrive(const void* gate, const char* operation, Site);

/** The array of this threadgroup that `key` stands for, full of 0xff bytes at first. */
void* threadgroup_memory(const void* key, size_t size, size_t align, const char* name);

}  // namespace vqkv::sim

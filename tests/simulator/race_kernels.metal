// Kernels with races, each of which must be reported, and what only looks like one.
#include "../../metal/prelude.h"

struct RaceParams {
  uint n;
};

#define RACE_ARGUMENTS                                                                       \
  device float *out [[buffer(0)]], constant RaceParams &p [[buffer(1)]],                     \
      uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]

#define BARRIER(scope, memory) scope##_barrier(mem_flags::mem_##memory)

// What the neighbour wrote, of the same simdgroup unless `BY` is 32.
#define READ_OF_OTHER(name, BY, BETWEEN)       \
  template <int X>                             \
  kernel void name(RACE_ARGUMENTS) {           \
    threadgroup_array(float, values, 64);      \
    values[tid] = float(tid);                  \
    BETWEEN;                                   \
    out[64 * tgid.x + tid] = values[tid ^ BY]; \
  }                                            \
  instantiate_kernel(name, name, 0)

READ_OF_OTHER(race_nothing_between, 1, )
READ_OF_OTHER(race_shuffle_between, 1, simd_sum(values[tid]))
READ_OF_OTHER(race_weak_barrier, 32, BARRIER(simdgroup, threadgroup))
READ_OF_OTHER(race_other_memory, 1, BARRIER(threadgroup, device))
READ_OF_OTHER(fine_barrier, 32, BARRIER(threadgroup, threadgroup))
READ_OF_OTHER(fine_simdgroup_barrier, 1, BARRIER(simdgroup, threadgroup))

// written again while others may still read
template <int X>
kernel void race_loop(RACE_ARGUMENTS) {
  threadgroup_array(float, values, 64);
  float sum = 0.0f;
  for (int i = 0; i < 3; i++) {
    values[tid] = float(tid) + float(i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += values[63 - tid];
    if (X)
      threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[64 * tgid.x + tid] = sum;
}
instantiate_kernel(race_loop, race_loop, 0)
instantiate_kernel(fine_loop, race_loop, 1)

// the result is the same in any order
template <int X>
kernel void race_same_value(RACE_ARGUMENTS) {
  threadgroup_array(float, value, 1);
  if (tid < 1 + X)
    value[0] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[64 * tgid.x + tid] = value[0];
}
instantiate_kernel(race_same_value, race_same_value, 1)
instantiate_kernel(fine_one_writer, race_same_value, 0)

// threadgroups share a value of the output
template <int X>
kernel void race_threadgroups(RACE_ARGUMENTS) {
  out[(64 - X) * tgid.x + tid] = 1.0f;
}
instantiate_kernel(race_threadgroups, race_threadgroups, 1)
instantiate_kernel(fine_threadgroups, race_threadgroups, 0)

// bytes of one word
template <int X>
kernel void fine_bytes(RACE_ARGUMENTS) {
  threadgroup_array(uchar, values, 64);
  values[tid] = uchar(tid);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[64 * tgid.x + tid] = float(values[63 - tid]);
}
instantiate_kernel(fine_bytes, fine_bytes, 0)

// the output as memory that threads share, ordered as X says
template <int X>
kernel void race_output(RACE_ARGUMENTS) {
  device float* own = out + 64 * tgid.x;
  own[tid] = float(tid);
  threadgroup_barrier(X ? mem_flags::mem_device : mem_flags::mem_threadgroup);
  const float other = own[63 - tid];
  threadgroup_barrier(X ? mem_flags::mem_device : mem_flags::mem_threadgroup);
  own[tid] = other;
}
instantiate_kernel(race_output, race_output, 0)
instantiate_kernel(fine_output, race_output, 1)

// One simdgroup writes for the other, three rounds. X: gates say when to read, and, after the
// reading or before, when to write.
template <int X>
kernel void race_gates(RACE_ARGUMENTS) {
  threadgroup_array(float, values, 32);
  threadgroup_array(metal::TileGate, gates, 2);
  if (tid == 0) {
    metal::gate_start(gates, 1);
    metal::gate_start(gates + 1, 1);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (uint i = 0; i < 3; i++) {
    if (sg == 0) {
      if (i > 0)
        metal::gate_wait(gates, (i - 1) & 1);
      values[lane] = float(i);
      metal::gate_written(gates + 1);
    } else {
      if (X & 1)
        metal::gate_wait(gates + 1, i & 1);
      if (X & 2)
        metal::gate_read(gates);
      sum += values[31 - lane];
      if (!(X & 2))
        metal::gate_read(gates);
    }
  }
  out[64 * tgid.x + tid] = sum;
}
instantiate_kernel(race_read_early, race_gates, 0)
instantiate_kernel(race_said_early, race_gates, 3)
instantiate_kernel(fine_gates, race_gates, 1)

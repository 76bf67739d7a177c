// Kernels with planted faults, each of which the simulator must report.
#include "../../metal/prelude.h"

struct BadParams {
  uint n;
};

#define BAD_ARGUMENTS                                                                        \
  device float *out [[buffer(0)]], constant BadParams &p [[buffer(1)]],                      \
      uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]

// early return before a barrier
template <int X>
kernel void bad_barrier(BAD_ARGUMENTS) {
  if (tid >= p.n)
    return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[tid] = 1.0f;
}

// simdgroup function in a divergent branch
template <int X>
kernel void bad_simd(BAD_ARGUMENTS) {
  float v = 0.0f;
  if (lane < 16)
    v = simd_sum(1.0f);
  out[tid] = v;
}

// barriers at different places
template <int X>
kernel void bad_site(BAD_ARGUMENTS) {
  if (sg == 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[tid] = 1.0f;
}

// simdgroup functions at different places
template <int X>
kernel void bad_simd_site(BAD_ARGUMENTS) {
  float v;
  if (lane < 16) {
    v = simd_sum(1.0f);
  } else {
    v = simd_sum(2.0f);
  }
  out[tid] = v;
}

// no barrier between writing and reading
template <int X>
kernel void bad_race(BAD_ARGUMENTS) {
  threadgroup_array(float, values, 64);
  values[tid] = float(tid);
  out[tid] = values[63 - tid];
}

// a barrier for the simdgroup where the threadgroup's is needed
template <int X>
kernel void bad_weak_barrier(BAD_ARGUMENTS) {
  threadgroup_array(float, values, 64);
  values[tid] = float(tid);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[tid] = values[63 - tid];
}

// X elements off, in device memory
template <int X>
kernel void bad_write(BAD_ARGUMENTS) {
  out[int(tid) + X] = 1.0f;
}
template <int X>
kernel void bad_read(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                     constant BadParams& p [[buffer(2)]],
                     uint3 tgid [[threadgroup_position_in_grid]],
                     uint tid [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]]) {
  out[tid] = in[int(tid) + X];
}

template <int X>
kernel void bad_const(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                      constant BadParams& p [[buffer(2)]],
                      uint3 tgid [[threadgroup_position_in_grid]],
                      uint tid [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint sg [[simdgroup_index_in_threadgroup]]) {
  ((device float*)in)[tid] = 1.0f;
}

// more than 32 KiB
template <int X>
kernel void bad_threadgroup_size(BAD_ARGUMENTS) {
  threadgroup_array(float, values, 4096);
  threadgroup_array(float, more, 4097);
  values[tid] = 1.0f;
  more[tid] = 1.0f;
  out[tid] = values[tid] + more[tid];
}

// threadgroup memory never written
template <int X>
kernel void bad_uninitialised(BAD_ARGUMENTS) {
  threadgroup_array(float, values, 64);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[tid] = values[tid];
}

// X elements off, in threadgroup memory
template <int X>
kernel void bad_threadgroup_write(BAD_ARGUMENTS) {
  threadgroup_array(float, values, 64);
  threadgroup float* v = values;
  v[tid + X] = 1.0f;
  out[tid] = 1.0f;
}
template <int X>
kernel void bad_threadgroup_read(BAD_ARGUMENTS) {
  threadgroup_array(float, values, 64);
  threadgroup float* v = values;
  v[tid] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[tid] = v[tid + X];
}

// arrays larger than a simulated thread's stack
template <int X>
kernel void bad_stack(BAD_ARGUMENTS) {
  float held[X];
  for (int i = X - 1; i >= 0; i--)
    held[(uint(i) + p.n) % X] = float(i);
  out[tid] = held[p.n];
}

instantiate_kernel(bad_barrier, bad_barrier, 0)
instantiate_kernel(bad_simd, bad_simd, 0)
instantiate_kernel(bad_site, bad_site, 0)
instantiate_kernel(bad_simd_site, bad_simd_site, 0)
instantiate_kernel(bad_race, bad_race, 0)
instantiate_kernel(bad_weak_barrier, bad_weak_barrier, 0)
instantiate_kernel(bad_write_after, bad_write, 1)
instantiate_kernel(bad_write_before, bad_write, -1)
instantiate_kernel(bad_read_after, bad_read, 1)
instantiate_kernel(bad_read_before, bad_read, -1)
instantiate_kernel(bad_const, bad_const, 0)
instantiate_kernel(bad_threadgroup_size, bad_threadgroup_size, 0)
instantiate_kernel(bad_uninitialised, bad_uninitialised, 0)
instantiate_kernel(bad_threadgroup_write, bad_threadgroup_write, 1)
instantiate_kernel(bad_threadgroup_read, bad_threadgroup_read, 1)
instantiate_kernel(bad_stack, bad_stack, 65536)

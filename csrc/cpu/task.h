// What the tasks of native kernels need on the host's side.
#pragma once

#include <memory>

#include "common.h"
#include "cpu/kernels.h"

namespace vqkv {

inline Real real_type(mx::Dtype t) {
  return t == mx::float32 ? Real::f32 : t == mx::float16 ? Real::f16 : Real::bf16;
}

/** Memory of the calling thread for one kind of task, valid until its next call. */
template <typename Task>
float* thread_scratch(int64_t floats) {
  thread_local std::unique_ptr<float[]> held;
  thread_local int64_t size = 0;
  if (size < floats) {
    held.reset(new float[floats]);
    size = floats;
  }
  return held.get();
}

}  // namespace vqkv

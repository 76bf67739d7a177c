// The CUDA kernels, compiled by nvcc and embedded; cmake/cuda.cmake writes the definition.
#pragma once

namespace vqkv::backend {

/** A fatbin for each file of metal/, then null. */
extern const void* const fatbins[];

}  // namespace vqkv::backend

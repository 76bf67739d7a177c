// As much of the macOS header of this name as MLX and metal-cpp need to compile.
#pragma once

namespace simd {
struct float4 {
  float x, y, z, w;
};
struct float4x4 {
  float4 columns[4];
};
}  // namespace simd

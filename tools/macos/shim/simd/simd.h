// Declarations of a macOS system header, as many as MLX and metal-cpp need to compile.
#pragma once
namespace simd { struct float3{float x,y,z;}; struct float4{float x,y,z,w;}; struct float4x4{float4 c[4];}; }
typedef simd::float4x4 simd_float4x4; typedef simd::float3 simd_float3;

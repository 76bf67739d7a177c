// MSL keywords and vector names as macros, for the simulator and CUDA. Must follow every other
// header: CUDA's own headers declare float4 and friends.
#pragma once

#define char2 msl_char2
#define char4 msl_char4
#define uchar2 msl_uchar2
#define uchar4 msl_uchar4
#define short2 msl_short2
#define short4 msl_short4
#define ushort2 msl_ushort2
#define ushort4 msl_ushort4
#define int2 msl_int2
#define int3 msl_int3
#define int4 msl_int4
#define uint2 msl_uint2
#define uint3 msl_uint3
#define uint4 msl_uint4
#define half2 msl_half2
#define half4 msl_half4
#define bfloat2 msl_bfloat2
#define bfloat4 msl_bfloat4
#define float2 msl_float2
#define float3 msl_float3
#define float4 msl_float4

#define device
#define thread
#define threadgroup
#define constant const

using namespace metal;

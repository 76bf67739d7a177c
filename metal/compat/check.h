// MSL for a type check by clang (17 or later, C++14): real address spaces, real half and bfloat.
// Nothing here runs. tools/check_address_spaces.py compiles kernels with it twice; the second time,
// with MSL_CHECK_THREAD, also `thread` is an address space, so that a bare pointer shows, and
// kernels are not instantiated.
#pragma once

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define M_LOG2E_F 1.44269504088896340736f
#define M_PI_F 3.14159265358979323846f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define kernel __attribute__((annotate("kernel")))
#define METAL_FUNC inline __attribute__((always_inline))
#define threadgroup_array(T, name, ...) static threadgroup T name[__VA_ARGS__]
#define program_constant(T, name, ...) static constant constexpr T name[__VA_ARGS__]
#define threadgroups_in_grid(n) (n)
#define TABLE_ROW_BYTES 64
#define QUAD_MATRICES 0
#define TILE_ROWS 32
#define TILE_SIMDS 4
#ifndef TILE_PRODUCERS  // the source of a kernel may ask for them
#define TILE_PRODUCERS 0
#endif
#define TILE_BUFFERS 1
#define threadgroup_bytes(name, n)                   \
  threadgroup_array(uint4, name##_memory, (n) / 16); \
  threadgroup uchar* name = (threadgroup uchar*)name##_memory
#define threadgroup_tables(name) threadgroup_bytes(name, 256 * TABLE_ROW_BYTES)
#define UNROLL
#define instantiate_kernel_groups(name, threads, groups, ...) instantiate_kernel(name, __VA_ARGS__)
#ifdef MSL_CHECK_THREAD
#define thread __attribute__((address_space(5)))
#define instantiate_kernel(name, func, ...)
#else
#define thread
#define instantiate_kernel(name, func, ...) template decltype(func<__VA_ARGS__>) func<__VA_ARGS__>;
#endif

#define MSL_EACH_VECTOR(X) \
  X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(half) X(bfloat) X(float)
#define MSL_TYPES(T)                                  \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_EACH_VECTOR(MSL_TYPES)
#undef MSL_TYPES

// float4(a, b, c, d): C++ has no such cast, so the spelling is a macro that calls make<float4>::of
namespace msl {
template <typename V>
struct make;
#define MSL_MAKE(T)             \
  template <>                   \
  struct make<T##2> {           \
    static T##2 of(T);          \
    static T##2 of(T, T);       \
    static T##2 of(char2);      \
    static T##2 of(uchar2);     \
    static T##2 of(short2);     \
    static T##2 of(ushort2);    \
    static T##2 of(int2);       \
    static T##2 of(uint2);      \
    static T##2 of(half2);      \
    static T##2 of(bfloat2);    \
    static T##2 of(float2);     \
  };                            \
  template <>                   \
  struct make<T##3> {           \
    static T##3 of(T);          \
    static T##3 of(T, T, T);    \
  };                            \
  template <>                   \
  struct make<T##4> {           \
    static T##4 of(T);          \
    static T##4 of(T, T, T, T); \
    static T##4 of(T##2, T##2); \
    static T##4 of(char4);      \
    static T##4 of(uchar4);     \
    static T##4 of(short4);     \
    static T##4 of(ushort4);    \
    static T##4 of(int4);       \
    static T##4 of(uint4);      \
    static T##4 of(half4);      \
    static T##4 of(bfloat4);    \
    static T##4 of(float4);     \
  };
MSL_EACH_VECTOR(MSL_MAKE)
#undef MSL_MAKE

template <bool>
struct only_if {};
template <>
struct only_if<true> {
  typedef void type;
};
}  // namespace msl

#define char2(...) msl::make<char2>::of(__VA_ARGS__)
#define char4(...) msl::make<char4>::of(__VA_ARGS__)
#define uchar2(...) msl::make<uchar2>::of(__VA_ARGS__)
#define uchar4(...) msl::make<uchar4>::of(__VA_ARGS__)
#define short2(...) msl::make<short2>::of(__VA_ARGS__)
#define short4(...) msl::make<short4>::of(__VA_ARGS__)
#define ushort2(...) msl::make<ushort2>::of(__VA_ARGS__)
#define ushort4(...) msl::make<ushort4>::of(__VA_ARGS__)
#define int2(...) msl::make<int2>::of(__VA_ARGS__)
#define int3(...) msl::make<int3>::of(__VA_ARGS__)
#define int4(...) msl::make<int4>::of(__VA_ARGS__)
#define uint2(...) msl::make<uint2>::of(__VA_ARGS__)
#define uint3(...) msl::make<uint3>::of(__VA_ARGS__)
#define uint4(...) msl::make<uint4>::of(__VA_ARGS__)
#define half2(...) msl::make<half2>::of(__VA_ARGS__)
#define half4(...) msl::make<half4>::of(__VA_ARGS__)
#define bfloat2(...) msl::make<bfloat2>::of(__VA_ARGS__)
#define bfloat4(...) msl::make<bfloat4>::of(__VA_ARGS__)
#define float2(...) msl::make<float2>::of(__VA_ARGS__)
#define float3(...) msl::make<float3>::of(__VA_ARGS__)
#define float4(...) msl::make<float4>::of(__VA_ARGS__)

namespace metal {

// bfloat has no overloads in MSL, and must not slip through as float
#define MSL_UNARY(name) \
  float name(float);    \
  half name(half);      \
  void name(bfloat) = delete;
MSL_UNARY(exp)
MSL_UNARY(exp2)
MSL_UNARY(log)
MSL_UNARY(log2)
MSL_UNARY(sqrt)
MSL_UNARY(rsqrt)
MSL_UNARY(floor)
MSL_UNARY(ceil)
MSL_UNARY(trunc)
MSL_UNARY(rint)
MSL_UNARY(round)
MSL_UNARY(abs)
#undef MSL_UNARY
int abs(int);
long abs(long);
bool isnan(float);
bool isnan(half);
void isnan(bfloat) = delete;
bool isfinite(float);
bool isfinite(half);
void isfinite(bfloat) = delete;

#define MSL_MINMAX(T) \
  T min(T, T);        \
  T max(T, T);        \
  T clamp(T, T, T);   \
  T select(T, T, bool);
MSL_MINMAX(char)
MSL_MINMAX(uchar)
MSL_MINMAX(short)
MSL_MINMAX(ushort)
MSL_MINMAX(int)
MSL_MINMAX(uint)
MSL_MINMAX(long)
MSL_MINMAX(ulong)
MSL_MINMAX(half)
MSL_MINMAX(float)
#undef MSL_MINMAX

float saturate(float);
float fma(float, float, float);
half fma(half, half, half);
#define MSL_FLOAT_VECTOR(V) \
  V fma(V, V, V);           \
  V min(V, V);              \
  V max(V, V);              \
  V abs(V);
MSL_FLOAT_VECTOR(half2)
MSL_FLOAT_VECTOR(half4)
MSL_FLOAT_VECTOR(float2)
MSL_FLOAT_VECTOR(float4)
#undef MSL_FLOAT_VECTOR
half dot(half2, half2);
half dot(half4, half4);
float dot(float2, float2);
float dot(float4, float4);

uint extract_bits(uint, uint, uint);
uint popcount(uint);
uint clz(uint);
uint ctz(uint);

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
};
simd_vote simd_ballot(bool);
bool simd_any(bool);
bool simd_all(bool);

// no bool, 64-bit or bfloat overloads in MSL
#define MSL_SIMD(T)               \
  T simd_sum(T);                  \
  T simd_max(T);                  \
  T simd_min(T);                  \
  T simd_shuffle(T, ushort);      \
  T simd_shuffle_xor(T, ushort);  \
  T simd_shuffle_up(T, ushort);   \
  T simd_shuffle_down(T, ushort); \
  T simd_broadcast(T, ushort);
#define MSL_SIMD_VECTORS(T) MSL_SIMD(T) MSL_SIMD(T##2) MSL_SIMD(T##4)
MSL_SIMD_VECTORS(char)
MSL_SIMD_VECTORS(uchar)
MSL_SIMD_VECTORS(short)
MSL_SIMD_VECTORS(ushort)
MSL_SIMD_VECTORS(int)
MSL_SIMD_VECTORS(uint)
MSL_SIMD_VECTORS(half)
MSL_SIMD_VECTORS(float)
#undef MSL_SIMD_VECTORS
#undef MSL_SIMD

uint matrix_row(uint);
uint matrix_column(uint);
uint matrix_lane(uint, uint);
half2 matrix_right(half2);
bfloat2 matrix_right(bfloat2);
void matrix_right_paired(thread half2*, float, uint);
void matrix_right_paired(thread bfloat2*, float, uint);
float matrix_from_row(float, uint, uint);
uint table_row(uint, int, uint);
uint word_at(uint, uint, uint);
void matrix_multiply_add(thread float2*, thread const half2*, thread const half2*);
void matrix_multiply_add(thread float2*, thread const bfloat2*, thread const bfloat2*);
float matrix_sum_rows(float);
float matrix_max_rows(float);
float matrix_sum_columns(float);
float matrix_max_columns(float);
half2 matrix_right_transposed(half2, uint);
bfloat2 matrix_right_transposed(bfloat2, uint);
template <typename T>
struct pair_of;
template <>
struct pair_of<half> {
  typedef half2 type;
};
template <>
struct pair_of<bfloat> {
  typedef bfloat2 type;
};
template <typename T>
typename pair_of<T>::type matrix_rounded(float, float);
void tile_barrier();
template <int D>
int tile_chunk(int, int);
template <int D>
int tile_query(int, int);
template <typename T, int D>
struct TileQueries {
  typename pair_of<T>::type left[D / 4];
};
template <typename T, int D>
void tile_queries(thread TileQueries<T, D>&, threadgroup const T*, uint, uint);
template <typename T, int D>
void tile_scores(thread float2*, thread const TileQueries<T, D>&, threadgroup const T*);
template <typename T, int D>
void tile_outputs(thread float2*, thread const typename pair_of<T>::type*, threadgroup const T*);
template <int N, int LATER>
void tile_wait(thread float2*);
template <int N, int LATER>
void tile_wait(thread float2*, float);
typedef uint TileGate;
void gate_start(threadgroup TileGate*, int);
void gate_wait(threadgroup const TileGate*, uint);
void gate_read(threadgroup TileGate*);
void gate_written(threadgroup TileGate*);
void producer_registers();
void consumer_registers();

}  // namespace metal
#undef MSL_EACH_VECTOR

template <typename To, typename From>
typename msl::only_if<sizeof(To) == sizeof(From)>::type as_type_sizes_agree();
template <typename To, typename From, typename = decltype(as_type_sizes_agree<To, From>())>
To as_type(From);

using namespace metal;

// not MSL
#pragma GCC poison double new delete throw try catch virtual goto std printf dynamic_cast

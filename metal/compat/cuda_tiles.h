// Products with tiles of threadgroup memory, on CUDA. Rows of a tile are pieces of 128 bytes, 64
// values, whose chunks of 16 bytes are permuted by the row: what wgmma calls a swizzle of 128
// bytes, and free of bank conflicts for ldmatrix. Compiled for sm_90a four warps multiply together
// by wgmma, and go on while it works; elsewhere each does by mma.
#pragma once

#define TILE_ROWS 64
#define TILE_SIMDS 8
// GPUs without wgmma may not have the memory for more.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TILE_BUFFERS 3
#define TILE_PRODUCERS 8
#else
#define TILE_BUFFERS 1
#define TILE_PRODUCERS 0
#endif

namespace metal {

template <int D>
MSL_DEVICE int tile_chunk(int row, int chunk) {
  return chunk / 8 * (TILE_ROWS * 8) + row * 8 + ((chunk ^ row) & 7);
}
template <typename T>
MSL_DEVICE vec<T, 2> matrix_rounded(float x, float y);
template <>
MSL_DEVICE vec<half, 2> matrix_rounded<half>(float x, float y) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
  return bit_cast<vec<half, 2>>(word);
}
template <>
MSL_DEVICE vec<bfloat, 2> matrix_rounded<bfloat>(float x, float y) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
  return bit_cast<vec<bfloat, 2>>(word);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

MSL_DEVICE void tile_barrier() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}

// Keeps the compiler from moving uses of registers past here.
template <int N>
MSL_DEVICE void pin(vec<float, 2>* c) {
#pragma unroll
  for (int i = 0; i < N; i++)
    asm volatile("" : "+f"(c[i].x), "+f"(c[i].y)::"memory");
}

// Rows of 128 bytes, eight rows after eight, `bytes` from the beginning of a tile.
MSL_DEVICE uint64_t tile_descriptor(uint32_t tile, int bytes) {
  const uint32_t low = ((tile >> 4) | 1u << 16) + (bytes >> 4);
  return uint64_t(low) | uint64_t(1024 >> 4 | 1u << 30) << 32;
}

// An mbarrier.
typedef uint64_t TileGate;
MSL_DEVICE uint32_t gate_at(const TileGate* g) {
  return uint32_t(__cvta_generic_to_shared(g));
}
MSL_DEVICE void gate_start(TileGate* g, int simds) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(gate_at(g)), "r"(simds) : "memory");
}
MSL_DEVICE void gate_wait(const TileGate* g, uint32_t round) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}\n" ::"r"(gate_at(g)),
      "r"(round)
      : "memory");
}
MSL_DEVICE void gate_read(TileGate* g) {
  __syncwarp();
  if ((threadIdx.x & 31u) == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(gate_at(g)) : "memory");
}
MSL_DEVICE void gate_written(TileGate* g) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  gate_read(g);
}
// Of the 128 that each of 512 threads begins with: 184 + 72 = 2 * 128.
MSL_DEVICE void producer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
}
MSL_DEVICE void consumer_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 184;");
}

#define MSL_PAIR(i) "+f"(c[i].x), "+f"(c[i].y)
#define MSL_SUMS                                                                             \
  MSL_PAIR(0), MSL_PAIR(1), MSL_PAIR(2), MSL_PAIR(3), MSL_PAIR(4), MSL_PAIR(5), MSL_PAIR(6), \
      MSL_PAIR(7), MSL_PAIR(8), MSL_PAIR(9), MSL_PAIR(10), MSL_PAIR(11), MSL_PAIR(12),       \
      MSL_PAIR(13), MSL_PAIR(14), MSL_PAIR(15)
#define MSL_WGMMA_TEXT(TYPE)                                                 \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                \
  " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define MSL_WGMMA(T, TYPE)                                                                         \
  /* c (+)= queries tile^T */                                                                      \
  template <>                                                                                      \
  MSL_DEVICE void wgmma_scores<T>(vec<float, 2> * c, const vec<T, 2>* a, uint64_t tile, int add) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n" MSL_WGMMA_TEXT(                      \
                     TYPE) "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"                           \
                 : MSL_SUMS                                                                        \
                 : "r"(bit_cast<uint32_t>(a[0])), "r"(bit_cast<uint32_t>(a[2])),                   \
                   "r"(bit_cast<uint32_t>(a[1])), "r"(bit_cast<uint32_t>(a[3])), "l"(tile),        \
                   "r"(add));                                                                      \
  }                                                                                                \
  /* c += a tile */                                                                                \
  MSL_DEVICE void wgmma_outputs(vec<float, 2>* c, const vec<T, 2>* a, uint64_t tile) {             \
    asm volatile(MSL_WGMMA_TEXT(TYPE) "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                   \
                 : MSL_SUMS                                                                        \
                 : "r"(bit_cast<uint32_t>(a[0])), "r"(bit_cast<uint32_t>(a[2])),                   \
                   "r"(bit_cast<uint32_t>(a[1])), "r"(bit_cast<uint32_t>(a[3])), "l"(tile));       \
  }
template <typename T>
MSL_DEVICE void wgmma_scores(vec<float, 2>* c, const vec<T, 2>* a, uint64_t tile, int add);
MSL_WGMMA(half, "f16")
MSL_WGMMA(bfloat, "bf16")
#undef MSL_WGMMA
#undef MSL_WGMMA_TEXT
#undef MSL_SUMS
#undef MSL_PAIR

template <int D>
MSL_DEVICE int tile_query(int row, int d) {
  return (row / 64 * (64 * D / 8) + tile_chunk<D>(row % 64, d / 8)) * 8 + d % 8;
}
template <typename T, int D>
struct TileQueries {
  vec<T, 2> left[D / 4];
};
template <typename T, int D>
MSL_DEVICE void tile_queries(TileQueries<T, D>& a, const T* queries, uint sg, uint lane) {
#pragma unroll
  for (int i = 0; i < D / 4; i++)
    a.left[i] = *reinterpret_cast<const vec<T, 2>*>(
        queries + tile_query<D>(16 * sg + matrix_row(lane) + i / 2 % 2 * 8,
                                i / 4 * 16 + i % 2 * 8 + matrix_column(lane)));
}
template <typename T, int D>
MSL_DEVICE void tile_scores(vec<float, 2>* c, const TileQueries<T, D>& a, const T* tile) {
  const uint32_t at = uint32_t(__cvta_generic_to_shared(tile));
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const int bytes = k / 4 * (TILE_ROWS * 128) + k % 4 * 32;
    wgmma_scores<T>(c, a.left + 4 * k, tile_descriptor(at, bytes), k > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <typename T, int D>
MSL_DEVICE void tile_outputs(vec<float, 2>* c, const vec<T, 2>* a, const T* tile) {
  const uint32_t at = uint32_t(__cvta_generic_to_shared(tile));
  pin<D / 4>(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < TILE_ROWS / 16; k++) {
#pragma unroll
    for (int h = 0; h < D / 64; h++)
      wgmma_outputs(c + 16 * h, a + 4 * k,
                    tile_descriptor(at, h * (TILE_ROWS * 128) + k * (16 * 128)));
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N, int LATER>
MSL_DEVICE void tile_wait(vec<float, 2>* c) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
  pin<N>(c);
}
// A store that never happens, as ptxas leaves stores and waits in their order.
template <int N, int LATER>
MSL_DEVICE void tile_wait(vec<float, 2>* c, float x) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.lt.f32 p, %0, 0f00000000;\n"
      "@p st.shared.u32 [%1], 0;\n}\n" ::"f"(x),
      "r"(0)
      : "memory");
  tile_wait<N, LATER>(c);
}

#else

MSL_DEVICE void tile_barrier() {
  __syncthreads();
}

// Four matrices of 8 x 8, from the row of a matrix whose address a lane gives.
#define MSL_LDMATRIX(name, TRANSPOSED)                                                            \
  template <typename T>                                                                           \
  MSL_DEVICE void name(vec<T, 2>* b, const T* tile, int chunk) {                                  \
    uint32_t w[4];                                                                                \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" TRANSPOSED ".shared.b16 {%0, %1, %2, %3}, [%4];" \
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])                                 \
                 : "r"(uint32_t(__cvta_generic_to_shared(tile)) + 16u * uint32_t(chunk)));        \
    _Pragma("unroll") for (int i = 0; i < 4; i++) b[i] = bit_cast<vec<T, 2>>(w[i]);               \
  }
MSL_LDMATRIX(load_rows, "")
MSL_LDMATRIX(load_columns, ".trans")
#undef MSL_LDMATRIX

template <int D>
MSL_DEVICE int tile_query(int row, int d) {
  return row * D + d;
}
template <typename T, int D>
struct TileQueries {
  vec<T, 2> left[D / 4];
};
template <typename T, int D>
MSL_DEVICE void tile_queries(TileQueries<T, D>& a, const T* queries, uint sg, uint lane) {
  queries += (16 * sg + matrix_row(lane)) * D + matrix_column(lane);
#pragma unroll
  for (int i = 0; i < D / 4; i++)
    a.left[i] =
        *reinterpret_cast<const vec<T, 2>*>(queries + i / 2 % 2 * 8 * D + i / 4 * 16 + i % 2 * 8);
}
template <typename T, int D>
MSL_DEVICE void tile_scores(vec<float, 2>* c, const TileQueries<T, D>& a, const T* tile) {
  const int lane = int(threadIdx.x & 31u), matrix = lane / 8;
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 4; i++)
    c[i] = vec<float, 2>(0.0f);
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
#pragma unroll
    for (int n = 0; n < TILE_ROWS / 8; n += 2) {
      vec<T, 2> b[4];
      load_rows(b, tile, tile_chunk<D>(8 * (n + matrix / 2) + lane % 8, 2 * k + matrix % 2));
      matrix_multiply_add(c + 2 * n, a.left + 4 * k, b);
      matrix_multiply_add(c + 2 * n + 2, a.left + 4 * k, b + 2);
    }
  }
}
template <typename T, int D>
MSL_DEVICE void tile_outputs(vec<float, 2>* c, const vec<T, 2>* a, const T* tile) {
  const int lane = int(threadIdx.x & 31u), matrix = lane / 8;
#pragma unroll
  for (int k = 0; k < TILE_ROWS / 16; k++) {
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      vec<T, 2> b[4];
      load_columns(b, tile, tile_chunk<D>(16 * k + 8 * (matrix % 2) + lane % 8, n + matrix / 2));
      matrix_multiply_add(c + 2 * n, a + 4 * k, b);
      matrix_multiply_add(c + 2 * n + 2, a + 4 * k, b + 2);
    }
  }
}
template <int N, int LATER>
MSL_DEVICE void tile_wait(vec<float, 2>*) {}

#endif

}  // namespace metal

using metal::matrix_rounded;
using metal::tile_barrier;
using metal::tile_chunk;
using metal::tile_outputs;
using metal::tile_queries;
using metal::tile_query;
using metal::tile_scores;
using metal::tile_wait;
using metal::TileQueries;
#if TILE_PRODUCERS > 0
using metal::consumer_registers;
using metal::gate_read;
using metal::gate_start;
using metal::gate_wait;
using metal::gate_written;
using metal::producer_registers;
using metal::TileGate;
#endif

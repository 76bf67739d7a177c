// Matrices of a simdgroup on Metal. The place of a lane's elements is not documented by Apple;
// MLX's own kernels rely on it as well.
#pragma once

METAL_FUNC uint matrix_row(uint lane) {
  return ((lane >> 2) & 4u) + ((lane >> 1) & 3u);
}
METAL_FUNC uint matrix_column(uint lane) {
  return ((lane >> 1) & 4u) + ((lane & 1u) << 1);
}
METAL_FUNC uint matrix_lane(uint row, uint column) {
  return ((row & 4u) << 2) | ((row & 3u) << 1) | ((column & 4u) << 1) | ((column >> 1) & 1u);
}
template <typename Pair>
METAL_FUNC Pair matrix_right(Pair b) {
  return b;
}
template <typename Pair>
METAL_FUNC Pair matrix_right_transposed(Pair b, uint lane) {
  const uint row = matrix_row(lane), column = matrix_column(lane);
  const uint word = as_type<uint>(b);
  const uint first = metal::simd_shuffle(word, ushort(matrix_lane(column, row)));
  const uint second = metal::simd_shuffle(word, ushort(matrix_lane(column + 1u, row)));
  return as_type<Pair>((row & 1u) != 0 ? (first >> 16) | (second & 0xffff0000u)
                                       : (first & 0xffffu) | (second << 16));
}
template <typename T>
METAL_FUNC void matrix_right_paired(thread metal::vec<T, 2>* b, float x, uint lane) {
  const float other = metal::simd_shuffle_xor(x, ushort(2));
  const bool odd = (lane & 2u) != 0;
  const T first = T(odd ? other : x), second = T(odd ? x : other), zero = T(0.0f);
  b[0] = odd ? metal::vec<T, 2>(zero, first) : metal::vec<T, 2>(first, zero);
  b[1] = odd ? metal::vec<T, 2>(zero, second) : metal::vec<T, 2>(second, zero);
}
METAL_FUNC float matrix_from_row(float x, uint row, uint lane) {
  return metal::simd_shuffle(x, ushort(matrix_lane(row, matrix_column(lane))));
}
template <typename T>
METAL_FUNC void matrix_multiply_add(thread float2* c, thread const metal::vec<T, 2>* a,
                                    thread const metal::vec<T, 2>* b) {
  for (int i = 0; i < 2; i++) {
    simdgroup_matrix<float, 8, 8> sum;
    reinterpret_cast<thread float2&>(sum.thread_elements()) = c[i];
    for (int k = 0; k < 2; k++) {
      simdgroup_matrix<T, 8, 8> left, right;
      reinterpret_cast<thread metal::vec<T, 2>&>(left.thread_elements()) = a[2 * i + k];
      reinterpret_cast<thread metal::vec<T, 2>&>(right.thread_elements()) = b[k];
      simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    c[i] = reinterpret_cast<thread float2&>(sum.thread_elements());
  }
}
METAL_FUNC uint table_row(uint word, int i, uint at) {
  return metal::extract_bits(word, 8u * uint(i), 8u) * TABLE_ROW_BYTES + at;
}
METAL_FUNC uint word_at(uint low, uint high, uint bit) {
  return (low >> bit) | ((high << 1) << (31u - bit));
}
METAL_FUNC float matrix_sum_rows(float x) {
  x += metal::simd_shuffle_xor(x, ushort(2));
  x += metal::simd_shuffle_xor(x, ushort(4));
  return x + metal::simd_shuffle_xor(x, ushort(16));
}
METAL_FUNC float matrix_max_rows(float x) {
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(2)));
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(4)));
  return metal::max(x, metal::simd_shuffle_xor(x, ushort(16)));
}
METAL_FUNC float matrix_sum_columns(float x) {
  x += metal::simd_shuffle_xor(x, ushort(1));
  return x + metal::simd_shuffle_xor(x, ushort(8));
}
METAL_FUNC float matrix_max_columns(float x) {
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(1)));
  return metal::max(x, metal::simd_shuffle_xor(x, ushort(8)));
}
template <typename T>
METAL_FUNC metal::vec<T, 2> matrix_rounded(float x, float y) {
  return metal::vec<T, 2>(T(x), T(y));
}

#define QUAD_MATRICES 0

// Tiles: with two of 32 rows of 128 values, and the tables, threadgroup memory is full.
#define TILE_ROWS 32
#define TILE_SIMDS 4
#define TILE_BUFFERS 1
#define TILE_PRODUCERS 0

METAL_FUNC void tile_barrier() {
  metal::threadgroup_barrier(mem_flags::mem_threadgroup);
}
template <int D>
METAL_FUNC int tile_chunk(int row, int chunk) {
  return row * (D / 8) + chunk;
}
template <int D>
METAL_FUNC int tile_query(int row, int d) {
  return row * D + d;
}
template <typename T, int D>
struct TileQueries {
  metal::vec<T, 2> left[D / 4];
};
template <typename T, int D>
METAL_FUNC void tile_queries(thread TileQueries<T, D>& a, threadgroup const T* queries, uint sg,
                             uint lane) {
  queries += (16u * sg + matrix_row(lane)) * D + matrix_column(lane);
  UNROLL
  for (int i = 0; i < D / 4; i++) {
    threadgroup const T* at = queries + i / 2 % 2 * 8 * D + i / 4 * 16 + i % 2 * 8;
    a.left[i] = metal::vec<T, 2>(at[0], at[1]);
  }
}
// c[i] += a[2 i + k] times an 8 x 8 part of a tile, for row halves i of the left matrices.
template <typename T, int D>
METAL_FUNC void tile_product(thread float2* c, thread const metal::vec<T, 2>* a,
                             threadgroup const T* part, int k, bool transposed) {
  simdgroup_matrix<T, 8, 8> right;
  simdgroup_load(right, part, D, ulong2(0, 0), transposed);
  for (int i = 0; i < 2; i++) {
    simdgroup_matrix<T, 8, 8> left;
    simdgroup_matrix<float, 8, 8> sum;
    reinterpret_cast<thread metal::vec<T, 2>&>(left.thread_elements()) = a[2 * i + k];
    reinterpret_cast<thread float2&>(sum.thread_elements()) = c[i];
    simdgroup_multiply_accumulate(sum, left, right, sum);
    c[i] = reinterpret_cast<thread float2&>(sum.thread_elements());
  }
}
template <typename T, int D>
METAL_FUNC void tile_scores(thread float2* c, thread const TileQueries<T, D>& a,
                            threadgroup const T* tile) {
  UNROLL
  for (int i = 0; i < TILE_ROWS / 4; i++)
    c[i] = float2(0.0f);
  UNROLL
  for (int k = 0; k < D / 8; k++) {
    UNROLL
    for (int n = 0; n < TILE_ROWS / 8; n++)
      tile_product<T, D>(c + 2 * n, a.left + k / 2 * 4, tile + 8 * n * D + 8 * k, k % 2, true);
  }
}
template <typename T, int D>
METAL_FUNC void tile_outputs(thread float2* c, thread const metal::vec<T, 2>* a,
                             threadgroup const T* tile) {
  UNROLL
  for (int k = 0; k < TILE_ROWS / 8; k++) {
    UNROLL
    for (int n = 0; n < D / 8; n++)
      tile_product<T, D>(c + 2 * n, a + k / 2 * 4, tile + 8 * k * D + 8 * n, k % 2, false);
  }
}
template <int N, int LATER>
METAL_FUNC void tile_wait(thread float2*) {}

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

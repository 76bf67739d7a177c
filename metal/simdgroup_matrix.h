// Matrices of a simdgroup on Metal. The place of a lane's elements is not documented by Apple;
// MLX's own kernels rely on it as well.
#pragma once

METAL_FUNC uint matrix_row(uint lane) {
  return ((lane >> 2) & 4u) + ((lane >> 1) & 3u);
}
METAL_FUNC uint matrix_column(uint lane) {
  return ((lane >> 1) & 4u) + ((lane & 1u) << 1);
}
template <typename Pair>
METAL_FUNC Pair matrix_right(Pair b) {
  return b;
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

// Hadamard transform of rows in threadgroup memory, for any size at run time.
#pragma once

#include "hadamard_matrix.h"
#include "params.h"
#include "prelude.h"

// Rows [0, count) of `width` values, `stride` apart, times H or its transpose. All threads of the
// threadgroup call it, after a barrier; it ends with one. HELD * threads covers all values.
template <int HELD>
METAL_FUNC void transform_rows(threadgroup float* rows, int count, int width, int stride,
                               constant BasisParams& b, bool transposed, uint tid, int threads) {
  const int n = width / b.order;
  for (int h = 1; h < n; h *= 2) {
    for (int i = int(tid); i < count * width / 2; i += threads) {
      const int row = count == 1 ? 0 : i / (width / 2), pair = i - row * (width / 2);
      threadgroup float* p = rows + row * stride + ((pair & ~(h - 1)) << 1) + (pair & (h - 1));
      const float x = p[0], y = p[h];
      p[0] = x + y;
      p[h] = x - y;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  float held[HELD];
  for (int k = 0; k < HELD; k++) {
    const int i = int(tid) + k * threads;
    float sum = 0.0f;
    if (i < count * width) {
      const int row = count == 1 ? 0 : i / width, c = i - row * width;
      threadgroup const float* p = rows + row * stride;
      if (b.order == 1)
        sum = p[c];
      const int entry = b.order == 1 ? 0 : c / n, t = c & (n - 1);
      for (int j = 0; b.order > 1 && j < b.order; j++) {
        const uint bits = transposed ? hadamard_matrix_row(b.order, j) >> entry
                                     : hadamard_matrix_row(b.order, entry) >> j;
        sum += (bits & 1) != 0 ? p[j * n + t] : -p[j * n + t];
      }
    }
    held[k] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int k = 0; k < HELD; k++) {
    const int i = int(tid) + k * threads;
    if (i < count * width) {
      const int row = count == 1 ? 0 : i / width;
      rows[row * stride + i - row * width] = held[k] * b.scale;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Trellis codes, apart from others because compilers take long for all in one file.
#include "attention_matrix.h"

#define MATRIX_TRELLIS_ROWS(tname, T, D, ROWS)                 \
  MATRIX_ROWS(tname, T, D, TRELLIS_CODE(1), trellis1, ROWS, 2) \
  MATRIX_ROWS(tname, T, D, TRELLIS_CODE(2), trellis2, ROWS, 2) \
  MATRIX_ROWS(tname, T, D, TRELLIS_CODE(3), trellis3, ROWS, 2) \
  MATRIX_ROWS(tname, T, D, TRELLIS_CODE(4), trellis4, ROWS, 2) \
  MATRIX_ROWS(tname, T, D, TRELLIS_ANY, trellis, ROWS, 2)
#define MATRIX_TRELLIS(tname, T)         \
  MATRIX_TRELLIS_ROWS(tname, T, 64, 8)   \
  MATRIX_TRELLIS_ROWS(tname, T, 64, 16)  \
  MATRIX_TRELLIS_ROWS(tname, T, 128, 8)  \
  MATRIX_TRELLIS_ROWS(tname, T, 128, 16) \
  MATRIX_TRELLIS_ROWS(tname, T, 256, 8)

MATRIX_TRELLIS(float16, half)
MATRIX_TRELLIS(bfloat16, bfloat)

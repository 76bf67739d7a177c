#include "attention_matrix.h"

// Codes of a byte, of so many values.
#define MATRIX_BYTES(tname, T, D, DIMS, GROUPS)   \
  MATRIX_ROWS(tname, T, D, DIMS, DIMS, 4, GROUPS) \
  MATRIX_ROWS(tname, T, D, DIMS, DIMS, 8, 2)      \
  MATRIX_ROWS(tname, T, D, DIMS, DIMS, 16, 2)
#define MATRIX_WIDTH(tname, T, D, GROUPS) \
  MATRIX_BYTES(tname, T, D, 2, GROUPS)    \
  MATRIX_BYTES(tname, T, D, 4, GROUPS)    \
  MATRIX_BYTES(tname, T, D, 8, GROUPS)
#define MATRIX(tname, T)         \
  MATRIX_WIDTH(tname, T, 64, 3)  \
  MATRIX_WIDTH(tname, T, 128, 3) \
  MATRIX_WIDTH(tname, T, 256, 2)

MATRIX(float16, half)
MATRIX(bfloat16, bfloat)

#include "attention.h"

#include "attention_matrix.h"
#include "attention_merge.h"

// Query rows and tokens per tile shrink with the width, to stay within 32 KiB of threadgroup
// memory.
#define ATTENTION(tname, T)                                                        \
  instantiate_kernel(attention_tile_##tname##_128, attention_tile, T, 128, 16, 32) \
  instantiate_kernel(attention_tile_##tname##_256, attention_tile, T, 256, 8, 16)  \
  instantiate_kernel(attention_tile_##tname##_576, attention_tile, T, 576, 4, 8)   \
  instantiate_kernel(attention_merge_##tname, attention_merge, T)

ATTENTION(float32, float)
ATTENTION(float16, half)
ATTENTION(bfloat16, bfloat)

// Code and what it is called, query rows; threadgroups that a core should hold.
#define MATRIX_ROWS(tname, T, D, CODE, code, ROWS, GROUPS)                                       \
  instantiate_kernel_groups(attention_matrix_##tname##_##D##_##code##_##ROWS, ATTENTION_THREADS, \
                            GROUPS, attention_matrix, T, D, CODE, ROWS)
#define MATRIX_BYTES(tname, T, D, DIMS, GROUPS)   \
  MATRIX_ROWS(tname, T, D, DIMS, DIMS, 4, GROUPS) \
  MATRIX_ROWS(tname, T, D, DIMS, DIMS, 8, 2)      \
  MATRIX_ROWS(tname, T, D, DIMS, DIMS, 16, 2)
#define MATRIX_BYTE_CODES(tname, T, D, GROUPS) \
  MATRIX_BYTES(tname, T, D, 2, GROUPS)         \
  MATRIX_BYTES(tname, T, D, 4, GROUPS)         \
  MATRIX_BYTES(tname, T, D, 8, GROUPS)
#define MATRIX_TRELLIS(tname, T, D, ROWS)                      \
  MATRIX_ROWS(tname, T, D, TRELLIS_CODE(1), trellis1, ROWS, 2) \
  MATRIX_ROWS(tname, T, D, TRELLIS_CODE(2), trellis2, ROWS, 2) \
  MATRIX_ROWS(tname, T, D, TRELLIS_CODE(3), trellis3, ROWS, 2) \
  MATRIX_ROWS(tname, T, D, TRELLIS_CODE(4), trellis4, ROWS, 2) \
  MATRIX_ROWS(tname, T, D, TRELLIS_ANY, trellis, ROWS, 2)
#define MATRIX(tname, T)              \
  MATRIX_BYTE_CODES(tname, T, 64, 3)  \
  MATRIX_BYTE_CODES(tname, T, 128, 3) \
  MATRIX_BYTE_CODES(tname, T, 256, 2) \
  MATRIX_TRELLIS(tname, T, 64, 8)     \
  MATRIX_TRELLIS(tname, T, 64, 16)    \
  MATRIX_TRELLIS(tname, T, 128, 8)    \
  MATRIX_TRELLIS(tname, T, 128, 16)   \
  MATRIX_TRELLIS(tname, T, 256, 8)

MATRIX(float16, half)
MATRIX(bfloat16, bfloat)

#define MERGE_ROWS(tname, T)                                                         \
  instantiate_kernel(attention_merge_rows_##tname##_64, attention_merge_rows, T, 64) \
  instantiate_kernel(attention_merge_rows_##tname##_128, attention_merge_rows, T, 128)

MERGE_ROWS(float16, half)
MERGE_ROWS(bfloat16, bfloat)

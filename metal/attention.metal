#include "attention.h"

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

#define MERGE_ROWS(tname, T)                                                         \
  instantiate_kernel(attention_merge_rows_##tname##_64, attention_merge_rows, T, 64) \
  instantiate_kernel(attention_merge_rows_##tname##_128, attention_merge_rows, T, 128)

MERGE_ROWS(float16, half)
MERGE_ROWS(bfloat16, bfloat)

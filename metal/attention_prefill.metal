#include "attention_prefill.h"

// Width, values per code.
#define PREFILL_CODE(tname, T, D, CODE)                                                   \
  instantiate_kernel_groups(attention_prefill_##tname##_##D##_##CODE, PREFILL_THREADS, 1, \
                            attention_prefill, T, D, CODE)
#define PREFILL_CODES(tname, T, D) \
  PREFILL_CODE(tname, T, D, 2)     \
  PREFILL_CODE(tname, T, D, 4)     \
  PREFILL_CODE(tname, T, D, 8)
#define PREFILL(tname, T)     \
  PREFILL_CODES(tname, T, 64) \
  PREFILL_CODES(tname, T, 128)

PREFILL(float16, half)
PREFILL(bfloat16, bfloat)

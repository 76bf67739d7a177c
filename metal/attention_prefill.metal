#include "attention_prefill.h"

// Width, code and what it is called.
#define PREFILL_CODE(tname, T, D, CODE, code)                                             \
  instantiate_kernel_groups(attention_prefill_##tname##_##D##_##code, PREFILL_THREADS, 1, \
                            attention_prefill, T, D, CODE)
#define PREFILL_CODES(tname, T, D)                     \
  PREFILL_CODE(tname, T, D, 2, 2)                      \
  PREFILL_CODE(tname, T, D, 4, 4)                      \
  PREFILL_CODE(tname, T, D, 8, 8)                      \
  PREFILL_CODE(tname, T, D, TRELLIS_CODE(1), trellis1) \
  PREFILL_CODE(tname, T, D, TRELLIS_CODE(2), trellis2) \
  PREFILL_CODE(tname, T, D, TRELLIS_CODE(3), trellis3) \
  PREFILL_CODE(tname, T, D, TRELLIS_CODE(4), trellis4) \
  PREFILL_CODE(tname, T, D, TRELLIS_ANY, trellis)
#define PREFILL(tname, T)     \
  PREFILL_CODES(tname, T, 64) \
  PREFILL_CODES(tname, T, 128)

PREFILL(float16, half)
PREFILL(bfloat16, bfloat)

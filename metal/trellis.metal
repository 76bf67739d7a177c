#include "trellis.h"

// Bits per value; widest row.
#define TRELLIS(B)                                                     \
  instantiate_kernel(trellis_encode_##B##_128, trellis_encode, B, 128) \
  instantiate_kernel(trellis_encode_##B##_576, trellis_encode, B, 576)

TRELLIS(1)
TRELLIS(2)
TRELLIS(3)
TRELLIS(4)

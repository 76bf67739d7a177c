#include "scalar.h"

#define BITS(cname, C)                                \
  instantiate_kernel(pack_bits_##cname, pack_bits, C) \
  instantiate_kernel(unpack_bits_##cname, unpack_bits, C)
#define SCALAR(tname, T)                                          \
  instantiate_kernel(quantize_scalar_##tname, quantize_scalar, T) \
  instantiate_kernel(dequantize_scalar_##tname, dequantize_scalar, T)

BITS(uint8, uchar)
BITS(uint16, ushort)
SCALAR(float32, float)
SCALAR(float16, half)
SCALAR(bfloat16, bfloat)

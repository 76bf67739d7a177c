#include "vq_quads.h"

#define QUANTIZE_VQ(tname, T, cname, C, D) \
  instantiate_kernel(quantize_vq_##tname##_##cname##_##D, quantize_vq, T, C, D)
// short vectors leave registers for six threadgroups to a core
#define QUANTIZE_SHORT(tname, T, cname, C, D)                                                      \
  instantiate_kernel_groups(quantize_vq_##tname##_##cname##_##D, VQ_THREADS, 6, quantize_vq, T, C, \
                            D)
#define DEQUANTIZE_VQ(tname, T, cname, C) \
  instantiate_kernel(dequantize_vq_##tname##_##cname, dequantize_vq, T, C)
#define VQ(tname, T)                        \
  QUANTIZE_VQ(tname, T, uint8, uchar, 0)    \
  QUANTIZE_SHORT(tname, T, uint8, uchar, 2) \
  QUANTIZE_SHORT(tname, T, uint8, uchar, 4) \
  QUANTIZE_VQ(tname, T, uint8, uchar, 8)    \
  QUANTIZE_VQ(tname, T, uint16, ushort, 0)  \
  QUANTIZE_VQ(tname, T, uint16, ushort, 8)  \
  DEQUANTIZE_VQ(tname, T, uint8, uchar)     \
  DEQUANTIZE_VQ(tname, T, uint16, ushort)

VQ(float32, float)
VQ(float16, half)
VQ(bfloat16, bfloat)

#if QUAD_MATRICES
#define VQ_QUADS(tname, T, D)                                                           \
  instantiate_kernel_groups(quantize_vq_quads_##tname##_##D, VQ_THREADS, D > 4 ? 3 : 5, \
                            quantize_vq_quads, T, uchar, D)
#define VQ_QUADS_OF(tname, T) VQ_QUADS(tname, T, 2) VQ_QUADS(tname, T, 4) VQ_QUADS(tname, T, 8)

VQ_QUADS_OF(float32, float)
VQ_QUADS_OF(float16, half)
VQ_QUADS_OF(bfloat16, bfloat)
#endif

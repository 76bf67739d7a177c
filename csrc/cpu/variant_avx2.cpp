#define VQKV_VARIANT avx2
#define VQKV_VECTOR_BYTES 32
#include "cpu/variant.h"

#define VQKV_VARIANT avx512
#define VQKV_VECTOR_BYTES 64
#include "cpu/variant.h"

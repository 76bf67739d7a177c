#define VQKV_VARIANT baseline
#define VQKV_VECTOR_BYTES 16
#include "cpu/variant.h"

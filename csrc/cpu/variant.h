// One instruction set's table: all kernels, inside a namespace of its own.
#pragma once

#include "attention/cpu_kernel.h"
#include "hadamard/cpu_quantize.h"
#include "qjl/cpu_kernel.h"
#include "scalar/cpu_kernel.h"
#include "trellis/cpu_kernel.h"
#include "vq/cpu_kernel.h"

#define VQKV_STRING_(name) #name
#define VQKV_STRING(name) VQKV_STRING_(name)

namespace vqkv::VQKV_VARIANT {

const Kernels table{VQKV_STRING(VQKV_VARIANT),
                    quantize,
                    attention,
                    pack_bits,
                    unpack_bits,
                    quantize_scalar,
                    dequantize_scalar,
                    hadamard,
                    hadamard_quantize,
                    qjl_products,
                    qjl_scores,
                    trellis_encode};

}  // namespace vqkv::VQKV_VARIANT

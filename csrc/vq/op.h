#pragma once

#include <optional>

#include "common.h"
#include "metal_params.h"

namespace vqkv {

/** Index of the nearest codebook row for every sub-vector of x; see ops.quantize_vq. */
mx::array quantize_vq(const mx::array& x, const mx::array& codebook, mx::StreamOrDevice s = {});

/** Codebook rows by index; see ops.dequantize_vq. The default dtype is the codebook's. */
mx::array dequantize_vq(const mx::array& codes, const mx::array& codebook,
                        std::optional<mx::Dtype> dtype = std::nullopt, mx::StreamOrDevice s = {});

/** dequantize_vq(quantize_vq(x)) with the straight-through gradient; see ops.fake_quantize_vq. */
mx::array fake_quantize_vq(const mx::array& x, const mx::array& codebook,
                           mx::StreamOrDevice s = {});

/** Extents of a call; `codes` says whether `shape` is that of codes or of x. */
VqParams vq_params(const char* op, const mx::Shape& shape, const mx::Shape& codebook, bool codes);

}  // namespace vqkv

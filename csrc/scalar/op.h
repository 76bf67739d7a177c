#pragma once

#include <optional>

#include "common.h"
#include "metal_params.h"

namespace vqkv {

/** Indices as a bit stream per row; see ops.pack_bits. */
mx::array pack_bits(const mx::array& indices, int bits, mx::StreamOrDevice s = {});

/** The inverse, rows of n entries; see ops.unpack_bits. */
mx::array unpack_bits(const mx::array& packed, int bits, int n, mx::StreamOrDevice s = {});

/** Index of the nearest centroid of every value, packed; see ops.quantize_scalar. */
mx::array quantize_scalar(const mx::array& x, const mx::array& centroids, int bits,
                          mx::StreamOrDevice s = {});

/** Centroids by packed index; see ops.dequantize_scalar. The default dtype is the centroids'. */
mx::array dequantize_scalar(const mx::array& packed, const mx::array& centroids, int bits, int n,
                            std::optional<mx::Dtype> dtype = std::nullopt,
                            mx::StreamOrDevice s = {});

/** The shape of n-entry rows packed, or of packed rows unpacked to n entries each. */
mx::Shape packed_shape(const char* op, mx::Shape entries, int bits);
mx::Shape unpacked_shape(const char* op, mx::Shape packed, int bits, int n);

/** Extents of a call on entries of this shape. */
ScalarParams scalar_params(const mx::Shape& entries, int bits);

/** What unpack_bits gives. */
inline mx::Dtype index_dtype(int bits) {
  return bits <= 8 ? mx::uint8 : mx::uint16;
}

}  // namespace vqkv

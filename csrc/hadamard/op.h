#pragma once

#include <optional>
#include <string>

#include "common.h"
#include "metal_params.h"

namespace vqkv {

/** (signs * x) H, or its transpose signs * (x H^T); see ops.hadamard. */
mx::array hadamard(const mx::array& x, const mx::array& signs, bool inverse = false,
                   mx::Dtype dtype = mx::float32, mx::StreamOrDevice s = {});

/**
 * {packed, scales}, and with a block {.., centres, centre scales}; see ops.hadamard_quantize.
 * centres and centre_scales are given both or not at all.
 */
std::vector<mx::array> hadamard_quantize(const mx::array& x, const mx::array& signs,
                                         const mx::array& centroids, int bits,
                                         const std::string& scale = "mse",
                                         std::optional<int> block = std::nullopt,
                                         const std::optional<mx::array>& centres = std::nullopt,
                                         const std::optional<mx::array>& centre_scales = {},
                                         mx::StreamOrDevice s = {});

/** The HadamardScale of a name, which `op` was given; and its name. */
int row_scale_kind(const char* op, const std::string& name);
const char* row_scale_name(int kind);

/** The m in {1, 12, 20, 28} with width = 2^k m, or 0. */
int hadamard_order(int width);

/** What a HadamardQuantize primitive carries. */
struct HadamardCode {
  int bits;
  int kind;   // HadamardScale
  int block;  // 0: no centre, or one that is given
  bool operator==(const HadamardCode&) const = default;
};

HadamardParams hadamard_params(const mx::Shape& x, mx::Dtype dtype, const mx::Shape& signs,
                               mx::Dtype out, bool inverse);
HadamardQuantizeParams hadamard_quantize_params(const mx::Shape& x, mx::Dtype dtype,
                                                const mx::Shape& signs, const HadamardCode& code,
                                                bool frozen);

/** Shapes of the outputs for vectors of shape x. */
std::vector<mx::Shape> hadamard_quantize_shapes(mx::Shape x, const HadamardCode& code);

}  // namespace vqkv

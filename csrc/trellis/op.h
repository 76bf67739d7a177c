#pragma once

#include <string>

#include "common.h"
#include "metal_params.h"

namespace vqkv {

/** {codes, scales} of the rows of x; see ops.trellis_encode. */
std::vector<mx::array> trellis_encode(const mx::array& x, const mx::array& table, int bits,
                                      const std::string& scale = "matched",
                                      mx::StreamOrDevice s = {});

/** What a TrellisEncode primitive carries. */
struct TrellisCode {
  int bits;
  int kind;  // HadamardScale
  bool operator==(const TrellisCode&) const = default;
};

TrellisParams trellis_params(const mx::Shape& x, const TrellisCode& code);

/** Shapes of codes and scales for vectors of shape x. */
std::vector<mx::Shape> trellis_shapes(const mx::Shape& x, const TrellisCode& code);

}  // namespace vqkv

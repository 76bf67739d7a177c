#include "trellis/primitive.h"

namespace vqkv {

std::vector<Launch> trellis_encode_launch(const std::vector<mx::array>& in,
                                          const std::vector<mx::array>& out,
                                          const TrellisCode& code) {
  const auto p = trellis_params(in[0].shape(), code);
  const bool narrow = p.width <= 128;
  const int simdgroups = narrow ? 4 : 2;  // as in metal/trellis.h
  Launch l;
  l.kernel = "trellis_encode_" + std::to_string(p.bits) + (narrow ? "_128" : "_576");
  l.inputs = in;
  l.outputs = out;
  l.set_params(p);
  l.grid = {groups(p.rows, simdgroups), 1, 1};
  l.threads = 32 * simdgroups;
  return {l};
}

}  // namespace vqkv

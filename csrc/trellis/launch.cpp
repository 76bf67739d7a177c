#include <algorithm>

#include "trellis/primitive.h"

namespace vqkv {
namespace {
constexpr int kValues = 640, kSimdgroups = 4;  // as in metal/trellis.h
}

Launch trellis_encode_launch(const std::vector<mx::array>& in, const std::vector<mx::array>& out,
                             const TrellisCode& code) {
  auto p = trellis_params(in[0].shape(), code);
  p.simdgroups = std::min(kSimdgroups, kValues / ((p.width + 7) / 8 * 8));
  Launch l;
  l.kernel = KernelName("trellis_encode", p.bits);
  l.inputs = arrays_of(in);
  l.outputs = arrays_of(out);
  l.params.set(p);
  l.grid = {groups(p.rows, p.simdgroups), 1, 1};
  l.threads = 32 * p.simdgroups;
  return l;
}

}  // namespace vqkv

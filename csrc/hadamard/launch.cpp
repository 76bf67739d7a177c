#include <algorithm>

#include "hadamard/op.h"
#include "hadamard/primitive.h"

namespace vqkv {
namespace {

constexpr int64_t kSimdgroups = 8;        // as in metal/hadamard.h
constexpr int64_t kHalvesSimdgroups = 4;  // as in metal/hadamard_halves.h
// Where threadgroups abound each has several tiles of rows, one after the other, which share what
// it sets up.
constexpr int64_t kTiles = 4, kThreadgroups = 1024;

/** Rows of a simdgroup that quantises, 32 / HADAMARD_LANES of metal/hadamard_quantize.h. */
int64_t rows_of_simdgroup(int width) {
  if (hadamard_order(width) > 1 || width < 32 || width > 512) {
    return 1;
  }
  return width <= 128 ? 8 : 1024 / width;
}

// Rows are counted in 32 bits there, one step beyond the last too.
constexpr int64_t kHalvesRows = int64_t(1) << 30;

/** Is it a call for the kernel of metal/hadamard_halves.h? Its simdgroups have 8 rows. */
bool takes_halves(const HadamardQuantizeParams& p, int width) {
  return !p.block && !p.frozen && p.wide && p.dtype != HADAMARD_FLOAT &&
         rows_of_simdgroup(width) == 8 && p.rows < kHalvesRows;
}

}  // namespace

Launch hadamard_launch(const mx::array& x, const mx::array& signs, const mx::array& out,
                       bool inverse) {
  auto p = hadamard_params(x.shape(), x.dtype(), signs.shape(), out.dtype(), inverse);
  Launch l;
  l.kernel = KernelName("hadamard", x.shape(-1));
  l.inputs = arrays(x, signs);
  l.outputs = arrays(out);
  l.params.set(p);
  l.grid = {groups(p.rows, kSimdgroups), 1, 1};
  l.threads = 32 * kSimdgroups;
  return l;
}

Launch hadamard_quantize_launch(const std::vector<mx::array>& in, const std::vector<mx::array>& out,
                                const HadamardCode& code) {
  const bool frozen = in.size() > 3;
  const auto& x = in[0];
  auto p = hadamard_quantize_params(x.shape(), x.dtype(), in[1].shape(), code, frozen);
  p.wide = aligned(x) && aligned(in[1]) && (!frozen || aligned(in[3]));
  const bool halves = takes_halves(p, x.shape(-1));
  const int64_t simdgroups = halves ? kHalvesSimdgroups : kSimdgroups;
  const int64_t tile = simdgroups * rows_of_simdgroup(x.shape(-1));
  const int64_t each = tile > simdgroups ? p.rows / (tile * kThreadgroups) : 1;
  p.tiles = static_cast<int>(groups(p.rows, tile));
  p.groups = static_cast<int>(groups(p.tiles, std::clamp<int64_t>(each, 1, kTiles)));
  Launch l;
  l.kernel = KernelName(code.block ? "hadamard_quantize_blocks"
                        : halves   ? "hadamard_quantize_halves"
                                   : "hadamard_quantize",
                        x.shape(-1));
  l.inputs = arrays_of(in);
  if (!code.block && !frozen && !halves) {
    l.inputs.push_back(&in[2]);  // in place of the centres, not read
    l.inputs.push_back(&in[2]);
  }
  l.outputs = arrays_of(out);
  l.params.set(p);
  l.grid = {code.block ? groups(p.rows, code.block) : static_cast<uint32_t>(p.groups), 1, 1};
  l.threads = static_cast<uint32_t>(32 * simdgroups);
  l.cuda_resident = code.block == 0;
  return l;
}

}  // namespace vqkv

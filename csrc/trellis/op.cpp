#include "trellis/op.h"

#include <cmath>

#include "contiguous.h"
#include "hadamard/op.h"
#include "trellis/primitive.h"

namespace vqkv {
namespace {
constexpr int kMaxWidth = 576, kStates = 256;
}

TrellisParams trellis_params(const mx::Shape& x, const TrellisCode& code) {
  TrellisParams p{};
  p.rows = 1;
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    p.rows *= x[i];
  }
  p.width = x.back();
  p.bits = code.bits;
  p.bytes = ((p.width - 1) * code.bits + 8 + 7) / 8;
  p.kind = code.kind;
  p.root = static_cast<float>(std::sqrt(static_cast<double>(p.width)));
  return p;
}

std::vector<mx::Shape> trellis_shapes(const mx::Shape& x, const TrellisCode& code) {
  mx::Shape codes = x, scales(x.begin(), x.end() - 1);
  codes.back() = trellis_params(x, code).bytes;
  return {codes, scales};
}

std::vector<mx::array> trellis_encode(const mx::array& x, const mx::array& table, int bits,
                                      const std::string& scale, mx::StreamOrDevice s_) {
  const char* op = "trellis_encode";
  require(is_float(x.dtype()), op, "x must be float32, float16 or bfloat16, but got ", x.dtype(),
          ".");
  require(x.ndim() >= 1 && x.shape(-1) >= 1 && x.shape(-1) <= kMaxWidth, op,
          "the last dimension of x must be 1 to ", kMaxWidth, ", but got shape ", x.shape(), ".");
  require(bits >= 1 && bits <= 4, op, "bits must be 1, 2, 3 or 4, but got ", bits, ".");
  require(is_float(table.dtype()), op, "table must be float32, float16 or bfloat16, but got ",
          table.dtype(), ".");
  require(table.ndim() == 1 && table.shape(0) == kStates, op, "table must have shape [", kStates,
          "], but got ", table.shape(), ".");
  const TrellisCode code{bits, row_scale_kind(op, scale)};
  auto s = mx::to_stream(s_);
  return mx::array::make_arrays(trellis_shapes(x.shape(), code), {mx::uint8, mx::bfloat16},
                                std::make_shared<TrellisEncode>(s, code),
                                {contiguous(x, mx::float32, s), contiguous(table, mx::float32, s)});
}

}  // namespace vqkv

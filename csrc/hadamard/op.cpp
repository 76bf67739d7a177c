#include "hadamard/op.h"

#include <cmath>
#include <utility>

#include "contiguous.h"
#include "hadamard/primitive.h"

namespace vqkv {
namespace {

constexpr int kMaxWidth = 1024;
const char* const kScales[] = {"mse", "norm", "unbiased", "matched"};  // as enum HadamardScale

int type_code(mx::Dtype t) {
  return t == mx::float32 ? HADAMARD_FLOAT : t == mx::float16 ? HADAMARD_HALF : HADAMARD_BFLOAT;
}

void check(const char* op, const mx::array& x, const mx::array& signs) {
  require(is_float(x.dtype()), op, "x must be float32, float16 or bfloat16, but got ", x.dtype(),
          ".");
  require(is_float(signs.dtype()), op, "signs must be float32, float16 or bfloat16, but got ",
          signs.dtype(), ".");
  require(x.ndim() >= 1, op, "x must have at least 1 dimension, but got a scalar.");
  const int width = x.shape(-1);
  require(width <= kMaxWidth && hadamard_order(width) > 0, op,
          "the last dimension of x must be 2^k * m with m in {1, 12, 20, 28}, at most ", kMaxWidth,
          ", but got ", width, ".");
  require((signs.ndim() == 1 || signs.ndim() == 2) && signs.shape(-1) == width, op,
          "signs must have shape [", width, "] or [H, ", width, "], but got ", signs.shape(), ".");
  if (signs.ndim() == 2) {
    require(x.ndim() >= 3 && x.shape(-3) == signs.shape(0), op, "with signs of ", signs.shape(0),
            " heads x must be [..., ", signs.shape(0), ", S, D], but got shape ", x.shape(), ".");
  }
}

template <typename Params>
void set_rows(Params& p, const mx::Shape& x, mx::Dtype dtype, const mx::Shape& signs) {
  p.rows = 1;
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    p.rows *= x[i];
  }
  p.seq = x.size() >= 2 ? std::max(1, x[x.size() - 2]) : 1;
  p.heads = signs.size() == 2 ? std::max(1, signs[0]) : 1;
  p.dtype = type_code(dtype);
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(x.back())));
}

}  // namespace

int row_scale_kind(const char* op, const std::string& name) {
  int kind = 0;
  while (kind < 4 && name != kScales[kind]) {
    ++kind;
  }
  require(kind < 4, op, "scale must be 'mse', 'norm', 'unbiased' or 'matched', but got '", name,
          "'.");
  return kind;
}

const char* row_scale_name(int kind) {
  return kScales[kind];
}

int hadamard_order(int width) {
  for (int m : {1, 12, 20, 28}) {
    const int n = width / m;
    if (n > 0 && n * m == width && (n & (n - 1)) == 0) {
      return m;
    }
  }
  return 0;
}

HadamardParams hadamard_params(const mx::Shape& x, mx::Dtype dtype, const mx::Shape& signs,
                               mx::Dtype out, bool inverse) {
  HadamardParams p{};
  set_rows(p, x, dtype, signs);
  p.out_dtype = type_code(out);
  p.inverse = inverse;
  return p;
}

HadamardQuantizeParams hadamard_quantize_params(const mx::Shape& x, mx::Dtype dtype,
                                                const mx::Shape& signs, const HadamardCode& code,
                                                bool frozen) {
  HadamardQuantizeParams p{};
  set_rows(p, x, dtype, signs);
  p.bits = code.bits;
  p.bytes = (x.back() * code.bits + 7) / 8;
  p.kind = code.kind;
  p.block = code.block;
  p.frozen = frozen;
  p.unit = 1.0f;
  if (!frozen && !code.block) {
    std::swap(p.scale, p.unit);
  }
  p.root = static_cast<float>(std::sqrt(static_cast<double>(x.back())));
  p.levels = 1 << code.bits;
  p.share = code.block ? 1.0f / static_cast<float>(code.block) : 0.0f;
  return p;
}

std::vector<mx::Shape> hadamard_quantize_shapes(mx::Shape x, const HadamardCode& code) {
  const int width = x.back();
  mx::Shape rows(x.begin(), x.end() - 1);
  std::vector<mx::Shape> out{rows, rows};
  out[0].push_back((width * code.bits + 7) / 8);
  if (code.block) {
    rows.back() /= code.block;
    out.push_back(rows);
    out.push_back(rows);
    out[2].push_back(width);
  }
  return out;
}

mx::array hadamard(const mx::array& x, const mx::array& signs, bool inverse, mx::Dtype dtype,
                   mx::StreamOrDevice s_) {
  const char* op = "hadamard";
  check(op, x, signs);
  require(is_float(dtype), op, "dtype must be float32, float16 or bfloat16, but got ", dtype, ".");
  auto s = mx::to_stream(s_);
  return mx::array(x.shape(), dtype, std::make_shared<Hadamard>(s, inverse, dtype),
                   inputs_of(contiguous(x, s), contiguous(signs, mx::float32, s)));
}

std::vector<mx::array> hadamard_quantize(const mx::array& x, const mx::array& signs,
                                         const mx::array& centroids, int bits,
                                         const std::string& scale, std::optional<int> block,
                                         const std::optional<mx::array>& centres,
                                         const std::optional<mx::array>& centre_scales,
                                         mx::StreamOrDevice s_) {
  const char* op = "hadamard_quantize";
  check(op, x, signs);
  require((bits >= 1 && bits <= 4) || bits == 8, op, "bits must be 1, 2, 3, 4 or 8, but got ", bits,
          ".");
  require(is_float(centroids.dtype()), op,
          "centroids must be float32, float16 or bfloat16, but got ", centroids.dtype(), ".");
  require(centroids.ndim() == 1 && centroids.shape(0) == 1 << bits, op,
          "centroids must have shape [2^bits] = [", 1 << bits, "], but got ", centroids.shape(),
          ".");
  const int kind = row_scale_kind(op, scale);
  require(centres.has_value() == centre_scales.has_value(), op,
          "centres must be given with their scales, but got one of the two.");
  require(!block || !centres, op, "a block and centres exclude each other, but got both.");
  if (block) {
    require(*block >= 1, op, "block must be at least 1, but got ", *block, ".");
    require(x.ndim() >= 2 && x.shape(-2) % *block == 0, op, "with a block x must be [..., S, D], S",
            " a multiple of ", *block, ", but got shape ", x.shape(), ".");
  }
  auto s = mx::to_stream(s_);
  auto inputs = inputs_of(contiguous(x, s), contiguous(signs, mx::float32, s),
                          contiguous(centroids, mx::float32, s));
  if (centres) {
    require(centres->dtype() == mx::int8 && centre_scales->dtype() == mx::bfloat16, op,
            "centres must be int8 and their scales bfloat16, but got ", centres->dtype(), " and ",
            centre_scales->dtype(), ".");
    require(x.ndim() >= 2, op, "with centres x must be [..., S, D], but got shape ", x.shape(),
            ".");
    auto shape = x.shape();
    shape[shape.size() - 2] = 1;
    require(centres->shape() == shape, op, "centres must have shape ", shape, ", but got ",
            centres->shape(), ".");
    shape.pop_back();
    require(centre_scales->shape() == shape, op, "the scales of centres must have shape ", shape,
            ", but got ", centre_scales->shape(), ".");
    inputs.push_back(contiguous(*centres, s));
    inputs.push_back(contiguous(*centre_scales, s));
  }
  const HadamardCode code{bits, kind, block.value_or(0)};
  std::vector<mx::Dtype> dtypes{mx::uint8, mx::bfloat16};
  if (block) {
    dtypes.insert(dtypes.end(), {mx::int8, mx::bfloat16});
  }
  return mx::array::make_arrays(hadamard_quantize_shapes(x.shape(), code), dtypes,
                                std::make_shared<HadamardQuantize>(s, code), inputs);
}

}  // namespace vqkv

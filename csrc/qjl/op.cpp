#include "qjl/op.h"

#include <cmath>
#include <numbers>

#include "contiguous.h"
#include "qjl/primitive.h"

namespace vqkv {
namespace {

constexpr int kMaxChannels = 4096, kMaxDims = 1024;

void check_float(const char* op, const char* name, const mx::array& a) {
  require(is_float(a.dtype()), op, name, " must be float32, float16 or bfloat16, but got ",
          a.dtype(), ".");
}

void check_sketch(const char* op, const mx::array& sketch, const char* name, const mx::array& x) {
  check_float(op, "sketch", sketch);
  require(sketch.ndim() == 2, op, "sketch must have shape [m, D], but got ", sketch.shape(), ".");
  const int m = sketch.shape(0), d = sketch.shape(1);
  require(m % 8 == 0 && m >= 8 && m <= kMaxChannels, op,
          "sketch must have a multiple of 8 rows, 8 to ", kMaxChannels, ", but got ", m, ".");
  require(d >= 1 && d <= kMaxDims, op, "sketch rows must have 1 to ", kMaxDims, " values, but got ",
          d, ".");
  require(x.shape(-1) == d, op, "the last dimension of ", name, " must be ", d,
          " (the sketch's D), but got shape ", x.shape(), ".");
}

}  // namespace

QjlParams qjl_params(const mx::Shape& x, const mx::Shape& sketch) {
  QjlParams p{};
  p.rows = 1;
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    p.rows *= x[i];
  }
  p.dims = sketch[1];
  p.channels = sketch[0];
  return p;
}

QjlScoresParams qjl_scores_params(const mx::Shape& out, const mx::Shape& signs) {
  QjlScoresParams p{};
  const size_t lead = signs.size() - 2;
  p.heads = 1;
  for (size_t i = 0; i < lead; ++i) {
    p.heads *= signs[i];
  }
  p.rows = out[lead] * (lead > 0 ? out[lead - 1] / signs[lead - 1] : 1);
  p.tokens = signs[lead];
  p.channels = signs[lead + 1] * 8;
  p.unit = static_cast<float>(std::sqrt(std::numbers::pi / 2) / p.channels);
  return p;
}

std::vector<mx::array> qjl_encode(const mx::array& x, const mx::array& sketch,
                                  mx::StreamOrDevice s_) {
  const char* op = "qjl_encode";
  check_float(op, "x", x);
  require(x.ndim() >= 1, op, "x must have at least 1 dimension, but got a scalar.");
  check_sketch(op, sketch, "x", x);
  auto s = mx::to_stream(s_);
  auto primitive = std::make_shared<QjlEncode>(s);
  auto in = inputs_of(contiguous(x, s), contiguous(sketch, mx::float32, s));
  auto shapes = primitive->output_shapes(in);
  return mx::array::make_arrays(shapes, {mx::uint8, mx::bfloat16}, primitive, in);
}

mx::array qjl_inner_product(const mx::array& q, const mx::array& sketch, const mx::array& signs,
                            const mx::array& norms, mx::StreamOrDevice s_) {
  const char* op = "qjl_inner_product";
  check_float(op, "q", q);
  require(q.ndim() >= 2, op, "q must have shape [..., L, D], but got ", q.shape(), ".");
  check_sketch(op, sketch, "q", q);
  require(signs.dtype() == mx::uint8, op, "signs must be uint8, but got ", signs.dtype(), ".");
  check_float(op, "norms", norms);
  const int bytes = sketch.shape(0) / 8;
  require(signs.ndim() == q.ndim() && signs.shape(-1) == bytes, op, "signs must have the ",
          q.ndim(), " dimensions of q, the last being ", bytes, " (the sketch's m / 8), but got ",
          signs.shape(), ".");
  const int lead = static_cast<int>(q.ndim()) - 2;
  bool fits = true;
  for (int i = 0; i < lead; ++i) {
    const int mine = q.shape(i), theirs = signs.shape(i);
    fits = fits && (mine == theirs || (i == lead - 1 && theirs > 0 && mine % theirs == 0));
  }
  require(fits, op,
          "signs must have the leading dimensions of q, or a divisor of the last of them (key "
          "heads), but got q ",
          q.shape(), " and signs ", signs.shape(), ".");
  auto tokens = signs.shape();
  tokens.pop_back();
  require(norms.shape() == tokens, op, "norms must have shape ", tokens, ", but got ",
          norms.shape(), ".");
  auto s = mx::to_stream(s_);
  auto primitive = std::make_shared<QjlInnerProduct>(s);
  auto in = inputs_of(contiguous(q, s), contiguous(sketch, mx::float32, s), contiguous(signs, s),
                      contiguous(norms, s));
  auto shapes = primitive->output_shapes(in);
  return mx::array(std::move(shapes[0]), mx::float32, std::move(primitive), std::move(in));
}

}  // namespace vqkv

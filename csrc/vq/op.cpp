#include "vq/op.h"

#include "contiguous.h"
#include "vq/primitive.h"

namespace vqkv {

VqParams vq_params(const char* op, const mx::Shape& shape, const mx::Shape& codebook, bool codes) {
  const char* first = codes ? "codes" : "x";
  const int ndim = static_cast<int>(codebook.size());
  require(ndim >= 2 && ndim <= 4, op,
          "codebook must have shape [K, d], [G, K, d] or [H, 1 or G, K, d], but got ", codebook,
          ".");
  require(!shape.empty(), op, first, " must have at least 1 dimension, but got a scalar.");
  VqParams p{};
  p.rows = codebook[ndim - 2];
  p.dims = codebook[ndim - 1];
  require(p.dims >= 1, op, "codebook rows must have at least 1 value, but got shape ", codebook,
          ".");
  require(p.rows >= 1 && p.rows <= 65536, op, "codebook must have 1 to 65536 rows, but got ",
          p.rows, ".");
  const int width = shape.back();
  if (codes) {
    p.groups = width;
  } else {
    require(width % p.dims == 0, op, "the last dimension of x must be a multiple of ", p.dims,
            " (the codebook's d), but got ", width, ".");
    p.groups = width / p.dims;
  }
  const int book_groups = ndim >= 3 ? codebook[ndim - 3] : 1;
  require(book_groups == p.groups || (book_groups == 1 && ndim != 3), op,
          "codebook must have one set of rows for each of the ", p.groups, " sub-vectors of ",
          first, ", but got shape ", codebook, ".");
  p.per_group = ndim >= 3 && book_groups > 1;
  p.seq = shape.size() >= 2 ? shape[shape.size() - 2] : 1;
  p.heads = 1;
  p.outer = 1;
  size_t lead = shape.size() >= 2 ? shape.size() - 2 : 0;
  if (ndim == 4) {
    require(shape.size() >= 3 && shape[shape.size() - 3] == codebook[0], op, "with a codebook of ",
            codebook[0], " heads ", first, " must be [..., ", codebook[0],
            ", S, width], but got shape ", shape, ".");
    p.heads = codebook[0];
    p.per_head = codebook[0] > 1;
    lead -= 1;
  }
  for (size_t i = 0; i < lead; ++i) {
    p.outer *= shape[i];
  }
  return p;
}

mx::array quantize_vq(const mx::array& x, const mx::array& codebook, mx::StreamOrDevice s_) {
  const char* op = "quantize_vq";
  require(is_float(x.dtype()), op, "x must be float32, float16 or bfloat16, but got ", x.dtype(),
          ".");
  require(is_float(codebook.dtype()), op, "codebook must be float32, float16 or bfloat16, but got ",
          codebook.dtype(), ".");
  auto p = vq_params(op, x.shape(), codebook.shape(), false);
  auto s = mx::to_stream(s_);
  auto shape = x.shape();
  shape.back() = p.groups;
  auto dtype = p.rows <= 256 ? mx::uint8 : mx::uint16;
  return mx::array(std::move(shape), dtype, std::make_shared<QuantizeVQ>(s),
                   inputs_of(contiguous(x, s), contiguous(codebook, mx::float32, s)));
}

mx::array dequantize_vq(const mx::array& codes, const mx::array& codebook,
                        std::optional<mx::Dtype> dtype, mx::StreamOrDevice s_) {
  const char* op = "dequantize_vq";
  require(codes.dtype() == mx::uint8 || codes.dtype() == mx::uint16, op,
          "codes must be uint8 or uint16, but got ", codes.dtype(), ".");
  require(is_float(codebook.dtype()), op, "codebook must be float32, float16 or bfloat16, but got ",
          codebook.dtype(), ".");
  auto out = dtype.value_or(codebook.dtype());
  require(is_float(out), op, "dtype must be float32, float16 or bfloat16, but got ", out, ".");
  auto p = vq_params(op, codes.shape(), codebook.shape(), true);
  auto s = mx::to_stream(s_);
  auto shape = codes.shape();
  shape.back() = p.groups * p.dims;
  return mx::array(std::move(shape), out, std::make_shared<DequantizeVQ>(s),
                   inputs_of(contiguous(codes, s), contiguous(codebook, out, s)));
}

mx::array fake_quantize_vq(const mx::array& x, const mx::array& codebook, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  auto y = dequantize_vq(quantize_vq(x, codebook, s), codebook, x.dtype(), s);
  return mx::array(x.shape(), x.dtype(), std::make_shared<StraightThrough>(s), {x, y});
}

}  // namespace vqkv

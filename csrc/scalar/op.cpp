#include "scalar/op.h"

#include "contiguous.h"
#include "scalar/primitive.h"

namespace vqkv {
namespace {

void check_bits(const char* op, int bits, int most) {
  require(bits >= 1 && bits <= most, op, "bits must be 1 to ", most, ", but got ", bits, ".");
}

void check_centroids(const char* op, const mx::array& centroids, int bits) {
  require(is_float(centroids.dtype()), op,
          "centroids must be float32, float16 or bfloat16, but got ", centroids.dtype(), ".");
  require(centroids.ndim() == 1 && centroids.shape(0) == 1 << bits, op,
          "centroids must have shape [2^bits] = [", 1 << bits, "], but got ", centroids.shape(),
          ".");
}

void check_packed(const char* op, const mx::array& packed) {
  require(packed.dtype() == mx::uint8, op, "packed must be uint8, but got ", packed.dtype(), ".");
}

}  // namespace

mx::Shape packed_shape(const char* op, mx::Shape entries, int bits) {
  require(!entries.empty(), op, "rows must have at least 1 dimension, but got a scalar.");
  const int64_t bytes = (int64_t(entries.back()) * bits + 7) / 8;
  require(bytes <= INT32_MAX, op, "rows must pack into less than 2^31 bytes, but got ", bytes, ".");
  entries.back() = static_cast<int>(bytes);
  return entries;
}

mx::Shape unpacked_shape(const char* op, mx::Shape packed, int bits, int n) {
  require(!packed.empty(), op, "packed must have at least 1 dimension, but got a scalar.");
  require(n >= 0, op, "n must be at least 0, but got ", n, ".");
  const int64_t bytes = (int64_t(n) * bits + 7) / 8;
  require(packed.back() == bytes, op, "packed rows of ", n, " entries of ", bits,
          " bits must have ", bytes, " bytes, but got shape ", packed, ".");
  packed.back() = n;
  return packed;
}

ScalarParams scalar_params(const mx::Shape& entries, int bits) {
  ScalarParams p{};
  p.rows = 1;
  for (size_t i = 0; i + 1 < entries.size(); ++i) {
    p.rows *= entries[i];
  }
  p.n = entries.back();
  p.bits = bits;
  if (p.n * bits % 8 == 0) {  // rows follow each other without gaps: they are one
    p.n *= p.rows;
    p.rows = 1;
  }
  p.bytes = (p.n * bits + 7) / 8;
  return p;
}

mx::array pack_bits(const mx::array& indices, int bits, mx::StreamOrDevice s_) {
  const char* op = "pack_bits";
  check_bits(op, bits, 16);
  require(indices.dtype() == index_dtype(bits), op, "indices of ", bits, " bits must be ",
          index_dtype(bits), ", but got ", indices.dtype(), ".");
  auto shape = packed_shape(op, indices.shape(), bits);
  auto s = mx::to_stream(s_);
  return mx::array(std::move(shape), mx::uint8, std::make_shared<PackBits>(s, bits),
                   inputs_of(contiguous(indices, s)));
}

mx::array unpack_bits(const mx::array& packed, int bits, int n, mx::StreamOrDevice s_) {
  const char* op = "unpack_bits";
  check_bits(op, bits, 16);
  check_packed(op, packed);
  auto shape = unpacked_shape(op, packed.shape(), bits, n);
  auto s = mx::to_stream(s_);
  return mx::array(std::move(shape), index_dtype(bits), std::make_shared<UnpackBits>(s, bits, n),
                   inputs_of(contiguous(packed, s)));
}

mx::array quantize_scalar(const mx::array& x, const mx::array& centroids, int bits,
                          mx::StreamOrDevice s_) {
  const char* op = "quantize_scalar";
  check_bits(op, bits, 8);
  require(is_float(x.dtype()), op, "x must be float32, float16 or bfloat16, but got ", x.dtype(),
          ".");
  check_centroids(op, centroids, bits);
  auto shape = packed_shape(op, x.shape(), bits);
  auto s = mx::to_stream(s_);
  return mx::array(std::move(shape), mx::uint8, std::make_shared<QuantizeScalar>(s, bits),
                   inputs_of(contiguous(x, s), contiguous(centroids, mx::float32, s)));
}

mx::array dequantize_scalar(const mx::array& packed, const mx::array& centroids, int bits, int n,
                            std::optional<mx::Dtype> dtype, mx::StreamOrDevice s_) {
  const char* op = "dequantize_scalar";
  check_bits(op, bits, 8);
  check_packed(op, packed);
  check_centroids(op, centroids, bits);
  auto out = dtype.value_or(centroids.dtype());
  require(is_float(out), op, "dtype must be float32, float16 or bfloat16, but got ", out, ".");
  auto shape = unpacked_shape(op, packed.shape(), bits, n);
  auto s = mx::to_stream(s_);
  return mx::array(std::move(shape), out, std::make_shared<DequantizeScalar>(s, bits, n),
                   inputs_of(contiguous(packed, s), contiguous(centroids, out, s)));
}

}  // namespace vqkv

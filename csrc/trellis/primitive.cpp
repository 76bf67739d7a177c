#include "trellis/primitive.h"

#include "evaluate.h"
#include "hadamard/op.h"
#include "mlx/ops.h"
#include "vmap.h"

namespace vqkv {

void TrellisEncode::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_cpu(
      out, stream(), [&](auto&) { return trellis_encode_launch(in, out, code_); },
      [&] { trellis_encode_cpu(in, out, code_, stream()); });
}

void TrellisEncode::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  evaluate_gpu(out, stream(), [&](auto&) { return trellis_encode_launch(in, out, code_); });
}

std::vector<mx::Shape> TrellisEncode::output_shapes(const std::vector<mx::array>& in) {
  return trellis_shapes(in[0].shape(), code_);
}

// Codes are piecewise constant, and the scales count as part of them: every derivative is zero.
std::vector<mx::array> TrellisEncode::vjp(const std::vector<mx::array>& primals,
                                          const std::vector<mx::array>&,
                                          const std::vector<int>& argnums,
                                          const std::vector<mx::array>&) {
  return zero_gradients(primals, argnums, stream());
}

std::vector<mx::array> TrellisEncode::jvp(const std::vector<mx::array>& primals,
                                          const std::vector<mx::array>&, const std::vector<int>&) {
  auto shapes = output_shapes(primals);
  return {mx::zeros(shapes[0], mx::uint8, stream()), mx::zeros(shapes[1], mx::bfloat16, stream())};
}

std::pair<std::vector<mx::array>, std::vector<int>> TrellisEncode::vmap(
    const std::vector<mx::array>& in, const std::vector<int>& axes) {
  return map_tables(in, axes, stream(), [&](const std::vector<mx::array>& a) {
    return trellis_encode(a[0], a[1], code_.bits, row_scale_name(code_.kind), stream());
  });
}

}  // namespace vqkv

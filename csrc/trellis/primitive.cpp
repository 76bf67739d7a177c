#include "trellis/primitive.h"

#include "backend/backend.h"
#include "hadamard/op.h"
#include "mlx/ops.h"

namespace vqkv {

void TrellisEncode::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  allocate(out);
  if (out[0].size() == 0) {
    return;
  }
  if (backend::simulated()) {
    backend::run_simulated(stream(), trellis_encode_launch(in, out, code_), {});
  } else {
    trellis_encode_cpu(in, out, code_, stream());
  }
}

void TrellisEncode::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  allocate(out);
  if (out[0].size() > 0) {
    backend::run_gpu(stream(), trellis_encode_launch(in, out, code_), {});
  }
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
  auto s = stream();
  auto front = [&](size_t i) { return axes[i] > 0 ? mx::moveaxis(in[i], axes[i], 0, s) : in[i]; };
  auto call = [&](const mx::array& x, const mx::array& table) {
    return trellis_encode(x, table, code_.bits, row_scale_name(code_.kind), s);
  };
  auto x = front(0), table = front(1);
  if (axes[1] < 0) {
    return {call(x, table), {0, 0}};
  }
  // Tables that differ from call to call have no kernel: one call each, stacked.
  std::vector<mx::array> codes, scales;
  for (int i = 0; i < table.shape(0); ++i) {
    auto one = call(axes[0] >= 0 ? mx::take(x, i, 0, s) : x, mx::take(table, i, 0, s));
    codes.push_back(one[0]);
    scales.push_back(one[1]);
  }
  return {{mx::stack(codes, 0, s), mx::stack(scales, 0, s)}, {0, 0}};
}

}  // namespace vqkv

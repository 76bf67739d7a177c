#include "contiguous.h"

#include "mlx/primitives.h"

namespace vqkv {

mx::array row_major(const mx::array& a, mx::Stream s, Temporaries& temporaries) {
  if (a.flags().row_contiguous) {
    return a;
  }
  // MLX's own copy, which it does not export; it asks its output for the stream
  const mx::array none(mx::Shape{0}, a.dtype(), nullptr, {});
  auto copy = mx::contiguous(none, false, s).primitive_ptr();
  std::vector<mx::array> out{mx::array(a.shape(), a.dtype(), copy, {})};
  if (s.device == mx::Device::gpu) {
    copy->eval_gpu({a}, out);
  } else {
    copy->eval_cpu({a}, out);
  }
  temporaries.push_back(out[0]);
  return out[0];
}

}  // namespace vqkv

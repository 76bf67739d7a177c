#include "append/op.h"

#include "mlx/ops.h"

namespace vqkv {
namespace {

constexpr const char* kOp = "append_tokens";

void check(const char* side, const mx::array& held, const mx::array& more, const mx::array& first,
           int at) {
  require(held.ndim() == 4 && is_float(held.dtype()) && held.dtype() == first.dtype(), kOp, "held ",
          side, " must be floating of shape [B, H, T, D], all arrays of one dtype, but got ",
          held.dtype(), " ", held.shape(), ".");
  require(more.ndim() == 4 && more.dtype() == held.dtype() && more.shape(0) == held.shape(0) &&
              more.shape(1) == held.shape(1) && more.shape(3) == held.shape(3),
          kOp, side, " must have the dtype, batch, heads and width of those held, ", held.dtype(),
          " ", held.shape(), ", but got ", more.dtype(), " ", more.shape(), ".");
  require(more.shape(2) >= 1, kOp, side, " must have at least one token, but got shape ",
          more.shape(), ".");
  require(at >= 0 && at <= held.shape(2) - more.shape(2), kOp, "slots must be within the ",
          held.shape(2), " of those held, but got ", at, " to ", at + more.shape(2), ".");
}

}  // namespace

std::vector<mx::array> append_tokens(const mx::array& held_keys, const mx::array& held_values,
                                     const mx::array& keys, const mx::array& values, int at,
                                     mx::StreamOrDevice s_) {
  check("keys", held_keys, keys, held_keys, at);
  check("values", held_values, values, held_keys, at);
  require(held_values.shape(0) == held_keys.shape(0) &&
              held_values.shape(1) == held_keys.shape(1) &&
              held_values.shape(2) == held_keys.shape(2) && keys.shape(2) == values.shape(2),
          kOp, "keys and values must differ in width alone, but got held ", held_keys.shape(),
          " and ", held_values.shape(), " and new ", keys.shape(), " and ", values.shape(), ".");
  auto s = mx::to_stream(s_);
  auto with = [&](const mx::array& held, const mx::array& more) {
    auto from = mx::Shape(4, 0), to = held.shape();
    from[2] = at;
    to[2] = at + more.shape(2);
    return mx::slice_update(held, more, from, to, s);
  };
  return {with(held_keys, keys), with(held_values, values)};
}

}  // namespace vqkv

#include <algorithm>
#include <memory>

#include "cpu/task.h"
#include "mlx/backend/cpu/encoder.h"
#include "parallel.h"
#include "qjl/op.h"
#include "qjl/primitive.h"

namespace vqkv {
namespace {

constexpr int kTokensPerTask = 8 * kQjlPanel;

using Floats = std::unique_ptr<float[]>;

Floats floats(int64_t n) {
  return Floats(new float[n]);
}

/** [channels, dims] as panels [dims, kQjlPanel] of sketch rows, zeros after the last row. */
Floats pack(const QjlParams& p, const float* sketch) {
  const int64_t panels = (p.channels + kQjlPanel - 1) / kQjlPanel;
  auto packed = floats(panels * kQjlPanel * p.dims);
  parallel_for(panels, [&](int64_t panel) {
    const int lanes = int(std::min<int64_t>(kQjlPanel, p.channels - panel * kQjlPanel));
    const float* from = sketch + panel * kQjlPanel * p.dims;
    float* to = packed.get() + panel * kQjlPanel * p.dims;
    for (int d = 0; d < p.dims; ++d, to += kQjlPanel) {
      for (int i = 0; i < lanes; ++i) {
        to[i] = from[int64_t(i) * p.dims + d];
      }
      std::fill(to + lanes, to + kQjlPanel, 0.0f);
    }
  });
  return packed;
}

/** Signs and norms, or with `products` those. */
void multiply(const QjlParams& p, const char* x, Real type, const float* sketch, uint8_t* signs,
              uint16_t* norms, float* products) {
  auto packed = pack(p, sketch);
  const int64_t size = type == Real::f32 ? 4 : 2;
  parallel_for((p.rows + kQjlRows - 1) / kQjlRows, [&](int64_t task) {
    const int64_t row = task * kQjlRows;
    QjlTile t{};
    t.x = x + row * p.dims * size;
    t.type = type;
    t.count = int(std::min<int64_t>(kQjlRows, p.rows - row));
    t.dims = p.dims;
    t.channels = p.channels;
    t.sketch = packed.get();
    t.scratch = thread_scratch<QjlTile>(int64_t(kQjlRows) * p.dims);
    t.signs = signs ? signs + row * (p.channels / 8) : nullptr;
    t.norms = norms ? norms + row : nullptr;
    t.products = products ? products + row * p.channels : nullptr;
    kernels().qjl_products(t);
  });
}

}  // namespace

void qjl_encode_cpu(const mx::array& x, const mx::array& sketch, std::vector<mx::array>& out,
                    const mx::Stream& s) {
  auto p = qjl_params(x.shape(), sketch.shape());
  mx::cpu::get_command_encoder(s).dispatch(
      [p, x = x.data<char>(), type = real_type(x.dtype()), sketch = sketch.data<float>(),
       signs = out[0].data<uint8_t>(),
       norms = out[1].data<uint16_t>()] { multiply(p, x, type, sketch, signs, norms, nullptr); });
}

void qjl_inner_product_cpu(const std::vector<mx::array>& in, mx::array& out, const mx::Stream& s) {
  auto rows = qjl_params(in[0].shape(), in[1].shape());
  auto p = qjl_scores_params(out.shape(), in[2].shape());
  mx::cpu::get_command_encoder(s).dispatch(
      [rows, p, q = in[0].data<char>(), type = real_type(in[0].dtype()),
       sketch = in[1].data<float>(), signs = in[2].data<uint8_t>(), norms = in[3].data<char>(),
       norm_type = real_type(in[3].dtype()), norm_size = in[3].itemsize(),
       out = out.data<float>()] {
        auto projected = floats(rows.rows * rows.channels);
        multiply(rows, q, type, sketch, nullptr, nullptr, projected.get());
        const int64_t chunks = (p.tokens + kTokensPerTask - 1) / kTokensPerTask;
        parallel_for(p.heads * chunks, [&](int64_t task) {
          const int64_t head = task / chunks, token = task % chunks * kTokensPerTask;
          QjlScoresTile t{};
          t.queries = projected.get() + head * p.rows * p.channels;
          t.rows = p.rows;
          t.channels = p.channels;
          t.signs = signs + (head * p.tokens + token) * (p.channels / 8);
          t.norms = norms + (head * p.tokens + token) * norm_size;
          t.type = norm_type;
          t.count = int(std::min<int64_t>(kTokensPerTask, p.tokens - token));
          t.unit = p.unit;
          t.out = out + head * p.rows * p.tokens + token;
          t.out_stride = p.tokens;
          t.scratch = thread_scratch<QjlTile>(int64_t(kQjlPanel) * p.channels);
          kernels().qjl_scores(t);
        });
      });
}

}  // namespace vqkv

#include <algorithm>

#include "cpu/task.h"
#include "mlx/backend/cpu/encoder.h"
#include "parallel.h"
#include "scalar/op.h"
#include "scalar/primitive.h"

namespace vqkv {
namespace {

constexpr int64_t kEntriesPerTask = 64 * 1024;  // a multiple of 8: parts begin at a whole byte

/** body(first entry, first byte, entries) for parts of rows that cover everything, in parallel. */
template <typename Body>
void each_part(const ScalarParams& p, Body body) {
  const int64_t parts = (p.n + kEntriesPerTask - 1) / kEntriesPerTask;  // of a row
  const int64_t rows = std::max<int64_t>(1, kEntriesPerTask / p.n);     // of a task
  const int64_t row_tasks = (p.rows + rows - 1) / rows;
  parallel_for(row_tasks * parts, [&](int64_t task) {
    const int64_t at = task % parts * kEntriesPerTask;
    const int64_t count = std::min(kEntriesPerTask, p.n - at);
    const int64_t first = task / parts * rows;
    for (int64_t row = first; row < std::min<int64_t>(first + rows, p.rows); ++row) {
      body(row * p.n + at, row * p.bytes + at / 8 * p.bits, count);
    }
  });
}

}  // namespace

void pack_bits_cpu(const mx::array& indices, mx::array& packed, int bits, const mx::Stream& s) {
  auto p = scalar_params(indices.shape(), bits);
  mx::cpu::get_command_encoder(s).dispatch(
      [p, in = indices.data<char>(), size = indices.itemsize(), out = packed.data<char>()] {
        each_part(p, [&](int64_t entry, int64_t byte, int64_t count) {
          kernels().pack_bits({in + entry * size, out + byte, count, p.bits, Real::f32, nullptr});
        });
      });
}

void unpack_bits_cpu(const mx::array& packed, mx::array& indices, int bits, const mx::Stream& s) {
  auto p = scalar_params(indices.shape(), bits);
  mx::cpu::get_command_encoder(s).dispatch(
      [p, in = packed.data<char>(), size = indices.itemsize(), out = indices.data<char>()] {
        each_part(p, [&](int64_t entry, int64_t byte, int64_t count) {
          kernels().unpack_bits({in + byte, out + entry * size, count, p.bits, Real::f32, nullptr});
        });
      });
}

void quantize_scalar_cpu(const mx::array& x, const mx::array& centroids, mx::array& packed,
                         int bits, const mx::Stream& s) {
  auto p = scalar_params(x.shape(), bits);
  mx::cpu::get_command_encoder(s).dispatch([p, in = x.data<char>(), type = real_type(x.dtype()),
                                            size = x.itemsize(), c = centroids.data<float>(),
                                            out = packed.data<char>()] {
    float bounds[255];
    for (int i = 0; i + 1 < 1 << p.bits; ++i) {
      bounds[i] = 0.5f * (c[i] + c[i + 1]);
    }
    each_part(p, [&](int64_t entry, int64_t byte, int64_t count) {
      kernels().quantize_scalar({in + entry * size, out + byte, count, p.bits, type, bounds});
    });
  });
}

void dequantize_scalar_cpu(const mx::array& packed, const mx::array& centroids, mx::array& out,
                           int bits, const mx::Stream& s) {
  auto p = scalar_params(out.shape(), bits);
  mx::cpu::get_command_encoder(s).dispatch([p, in = packed.data<char>(),
                                            type = real_type(out.dtype()), size = out.itemsize(),
                                            c = centroids.data<char>(), out = out.data<char>()] {
    each_part(p, [&](int64_t entry, int64_t byte, int64_t count) {
      kernels().dequantize_scalar({in + byte, out + entry * size, count, p.bits, type, c});
    });
  });
}

}  // namespace vqkv

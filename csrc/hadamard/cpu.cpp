#include <algorithm>

#include "cpu/task.h"
#include "hadamard/op.h"
#include "hadamard/primitive.h"
#include "mlx/backend/cpu/encoder.h"
#include "parallel.h"

namespace vqkv {
namespace {

constexpr int64_t kValuesPerTask = 32 * 1024;

/** body(first row, rows, sequence) for parts of sequences of `seq` rows, in parallel. */
template <typename Body>
void each_part(int64_t rows, int64_t seq, int64_t part, Body body) {
  const int64_t parts = (seq + part - 1) / part;
  parallel_for(rows / seq * parts, [&](int64_t task) {
    const int64_t at = task % parts * part;
    body(task / parts * seq + at, std::min(part, seq - at), task / parts);
  });
}

/** Rows of a task: whole groups of lanes. */
int64_t task_rows(int width) {
  return std::max<int64_t>(1, kValuesPerTask / width / kHadamardRows) * kHadamardRows;
}

HadamardTile tile(const mx::array& x, const mx::array& signs, float scale) {
  HadamardTile t{};
  t.x = x.data<char>();
  t.type = real_type(x.dtype());
  t.width = x.shape(-1);
  t.order = hadamard_order(t.width);
  t.signs = signs.data<float>();
  t.scale = scale;
  return t;
}

}  // namespace

void hadamard_cpu(const mx::array& x, const mx::array& signs, mx::array& out, bool inverse,
                  const mx::Stream& s) {
  auto p = hadamard_params(x.shape(), x.dtype(), signs.shape(), out.dtype(), inverse);
  auto t = tile(x, signs, p.scale);
  t.inverse = inverse;
  t.out_type = real_type(out.dtype());
  mx::cpu::get_command_encoder(s).dispatch(
      [p, t, in = x.data<char>(), in_size = x.itemsize() * t.width, out = out.data<char>(),
       out_size = out.itemsize() * t.width] {
        const int64_t seq = p.heads > 1 ? p.seq : p.rows;
        each_part(p.rows, seq, task_rows(t.width), [&](int64_t row, int64_t count, int64_t run) {
          auto part = t;
          part.x = in + row * in_size;
          part.out = out + row * out_size;
          part.count = count;
          part.signs += run % p.heads * t.width;
          part.scratch = thread_scratch<HadamardTile>(hadamard_scratch(t.width, 1));
          kernels().hadamard(part);
        });
      });
}

void hadamard_quantize_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out,
                           const HadamardCode& code, const mx::Stream& s) {
  const bool frozen = in.size() > 3;
  const auto& x = in[0];
  HadamardQuantizeTile t{};
  t.p = hadamard_quantize_params(x.shape(), x.dtype(), in[1].shape(), code, frozen);
  t.rows = tile(x, in[1], t.p.scale);
  t.packed = out[0].data<uint8_t>();
  t.scales = reinterpret_cast<uint16_t*>(out[1].data<char>());
  if (code.block) {
    t.block_centre = out[2].data<int8_t>();
    t.block_scale = reinterpret_cast<uint16_t*>(out[3].data<char>());
  }
  mx::cpu::get_command_encoder(s).dispatch(
      [t, in_size = x.itemsize() * t.rows.width, x = x.data<char>(),
       centroids = in[2].data<float>(), centres = frozen ? in[3].data<int8_t>() : nullptr,
       units = frozen ? reinterpret_cast<const uint16_t*>(in[4].data<char>()) : nullptr] {
        const auto& p = t.p;
        const int width = t.rows.width;
        float table[511];  // bounds, then levels
        for (int i = 0; i < 1 << p.bits; ++i) {
          table[255 + i] = centroids[i];
          if (i + 1 < 1 << p.bits) {
            table[i] = 0.5f * (centroids[i] + centroids[i + 1]);
          }
        }
        const bool runs = p.heads > 1 || p.frozen;
        const int64_t seq = p.block ? p.block : runs ? p.seq : p.rows;
        const int64_t groups = p.block ? (p.block + kHadamardRows - 1) / kHadamardRows : 1;
        each_part(p.rows, seq, p.block ? p.block : task_rows(width),
                  [&](int64_t row, int64_t count, int64_t run) {
                    auto part = t;
                    part.rows.x = x + row * in_size;
                    part.rows.count = count;
                    part.rows.signs += row / p.seq % p.heads * width;
                    part.rows.scratch =
                        thread_scratch<HadamardTile>(hadamard_scratch(width, groups));
                    part.table = table;
                    part.packed += row * p.bytes;
                    part.scales += row;
                    if (p.frozen) {
                      part.centre = centres + run * width;
                      part.centre_scale = units[run];
                    }
                    if (p.block) {
                      part.block_centre += run * width;
                      part.block_scale += run;
                    }
                    kernels().hadamard_quantize(part);
                  });
      });
}

}  // namespace vqkv

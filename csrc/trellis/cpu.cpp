#include <algorithm>

#include "cpu/task.h"
#include "mlx/backend/cpu/encoder.h"
#include "parallel.h"
#include "trellis/primitive.h"

namespace vqkv {

void trellis_encode_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out,
                        const TrellisCode& code, const mx::Stream& s) {
  const auto p = trellis_params(in[0].shape(), code);
  mx::cpu::get_command_encoder(s).dispatch(
      [p, x = in[0].data<float>(), table = in[1].data<float>(), codes = out[0].data<uint8_t>(),
       scales = reinterpret_cast<uint16_t*>(out[1].data<char>())] {
        parallel_for((p.rows + kHadamardRows - 1) / kHadamardRows, [&](int64_t task) {
          const int64_t row = task * kHadamardRows;
          TrellisTile t{};
          t.p = p;
          t.count = static_cast<int>(std::min<int64_t>(kHadamardRows, p.rows - row));
          t.x = x + row * p.width;
          t.table = table;
          t.codes = codes + row * p.bytes;
          t.scales = scales + row;
          t.scratch = thread_scratch<TrellisTile>(trellis_scratch(p.width));
          kernels().trellis_encode(t);
        });
      });
}

}  // namespace vqkv

#include <algorithm>
#include <cstring>

#include "cpu/task.h"
#include "mlx/backend/cpu/encoder.h"
#include "parallel.h"
#include "vq/op.h"
#include "vq/primitive.h"

namespace vqkv {
namespace {

constexpr int64_t kVectorsPerTask = 4096;

// Vectors of an op as runs that share a head; without per-head codebooks there is one run, and
// without per-group ones the groups of a token are more tokens.
struct Runs {
  int64_t runs, heads, tokens, groups, tokens_per_task, tasks_per_run;

  explicit Runs(const VqParams& p) {
    runs = p.per_head ? p.outer * p.heads : 1;
    heads = p.per_head ? p.heads : 1;
    tokens = p.seq * (p.per_head ? 1 : p.outer * p.heads) * (p.per_group ? 1 : p.groups);
    groups = p.per_group ? p.groups : 1;
    tokens_per_task = std::max<int64_t>(kQuantizeLanes, kVectorsPerTask / groups);
    tasks_per_run = (tokens + tokens_per_task - 1) / tokens_per_task;
  }

  /** body(first vector, tokens, head) for every task, in parallel. */
  template <typename Body>
  void each(Body body) const {
    parallel_for(runs * tasks_per_run, [&](int64_t task) {
      const int64_t run = task / tasks_per_run;
      const int64_t token = task % tasks_per_run * tokens_per_task;
      body((run * tokens + token) * groups, std::min(tokens_per_task, tokens - token), run % heads);
    });
  }
};

void quantize(const VqParams& p, const char* x, Real type, const float* book, char* codes) {
  const Runs work(p);
  const int64_t value = type == Real::f32 ? 4 : 2, code = p.rows <= 256 ? 1 : 2;
  const int64_t book_size = int64_t(p.rows) * p.dims;
  work.each([&](int64_t vector, int64_t count, int64_t head) {
    float* scratch = thread_scratch<VqParams>(int64_t(p.dims) * kQuantizeLanes);
    for (int64_t g = 0; g < work.groups; ++g) {
      kernels().quantize({x + (vector + g) * p.dims * value, type, work.groups * p.dims, count,
                          book + (head * work.groups + g) * book_size, p.rows, p.dims,
                          codes + (vector + g) * code, work.groups, scratch});
    }
  });
}

// Rows are copied as bytes: the codebook has the output's dtype already. Size 0: known at run time.
template <int Size, typename Code>
void look_up(const Code* codes, int64_t stride, int64_t count, const char* book, unsigned rows,
             int64_t row_size, const char* invalid, char* out) {
  const int64_t size = Size ? Size : row_size;
  for (int64_t i = 0; i < count; ++i) {
    const unsigned code = codes[i * stride];
    std::memcpy(out + i * stride * size, code < rows ? book + code * size : invalid, size);
  }
}

template <typename Code>
void dequantize(const VqParams& p, const Code* codes, const char* book, mx::Dtype dtype,
                char* out) {
  const Runs work(p);
  const int64_t row_size = int64_t(p.dims) * dtype.size();
  std::vector<char> invalid(row_size);
  const uint32_t nan = dtype == mx::float32 ? 0x7fc00000 : dtype == mx::float16 ? 0x7e00 : 0x7fc0;
  for (int j = 0; j < p.dims; ++j) {
    std::memcpy(invalid.data() + j * dtype.size(), &nan, dtype.size());
  }
  auto* kernel = row_size == 4    ? look_up<4, Code>
                 : row_size == 8  ? look_up<8, Code>
                 : row_size == 16 ? look_up<16, Code>
                 : row_size == 32 ? look_up<32, Code>
                                  : look_up<0, Code>;
  work.each([&](int64_t vector, int64_t count, int64_t head) {
    for (int64_t g = 0; g < work.groups; ++g) {
      kernel(codes + vector + g, work.groups, count,
             book + (head * work.groups + g) * p.rows * row_size, p.rows, row_size, invalid.data(),
             out + (vector + g) * row_size);
    }
  });
}

}  // namespace

void quantize_vq_cpu(const mx::array& x, const mx::array& codebook, mx::array& codes,
                     const mx::Stream& s) {
  auto p = vq_params("quantize_vq", x.shape(), codebook.shape(), false);
  mx::cpu::get_command_encoder(s).dispatch(
      [p, x = x.data<char>(), type = real_type(x.dtype()), book = codebook.data<float>(),
       codes = codes.data<char>()] { quantize(p, x, type, book, codes); });
}

void dequantize_vq_cpu(const mx::array& codes, const mx::array& codebook, mx::array& out,
                       const mx::Stream& s) {
  auto p = vq_params("dequantize_vq", codes.shape(), codebook.shape(), true);
  mx::cpu::get_command_encoder(s).dispatch(
      [p, codes = codes.data<char>(), wide = codes.dtype() == mx::uint16,
       book = codebook.data<char>(), dtype = out.dtype(), out = out.data<char>()] {
        if (wide) {
          dequantize(p, reinterpret_cast<const uint16_t*>(codes), book, dtype, out);
        } else {
          dequantize(p, reinterpret_cast<const uint8_t*>(codes), book, dtype, out);
        }
      });
}

}  // namespace vqkv

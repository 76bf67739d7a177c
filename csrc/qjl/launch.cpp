#include "qjl/op.h"
#include "qjl/primitive.h"

namespace vqkv {
namespace {

// as in metal/qjl.h
constexpr int64_t kThreads = 128, kVectors = 32, kChannels = 64, kRows = 8;

/** "encode" or "project". */
Launch products(const char* what, const mx::array& x, const mx::array& sketch,
                const Arrays& outputs) {
  auto p = qjl_params(x.shape(), sketch.shape());
  Launch l;
  l.kernel = KernelName("qjl", what, dtype_name(x.dtype()));
  l.inputs = arrays(x, sketch);
  l.outputs = outputs;
  l.params.set(p);
  l.grid = {groups(p.rows, kVectors), groups(p.channels, kChannels), 1};
  l.threads = kThreads;
  return l;
}

}  // namespace

Launch qjl_encode_launch(const mx::array& x, const mx::array& sketch,
                         const std::vector<mx::array>& out) {
  return products("encode", x, sketch, arrays_of(out));
}

std::array<Launch, 2> qjl_inner_product_launch(const std::vector<mx::array>& in,
                                               const mx::array& out, Temporaries& temporaries) {
  const auto &q = in[0], &sketch = in[1], &signs = in[2], &norms = in[3];
  auto p = qjl_scores_params(out.shape(), signs.shape());
  auto shape = q.shape();
  shape.back() = p.channels;
  const auto& projected =
      temporaries.emplace_back(shape, mx::float32, nullptr, std::vector<mx::array>{});

  Launch l;
  l.kernel = KernelName("qjl_scores", dtype_name(norms.dtype()));
  l.inputs = arrays(projected, signs, norms);
  l.outputs = arrays(out);
  l.params.set(p);
  l.grid = {groups(p.tokens, kThreads), groups(p.rows, kRows), groups(p.heads, 1)};
  l.threads = kThreads;
  return {products("project", q, sketch, arrays(projected)), l};
}

}  // namespace vqkv

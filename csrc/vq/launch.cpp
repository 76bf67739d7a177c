#include "backend/backend.h"
#include "vq/op.h"
#include "vq/primitive.h"

namespace vqkv {
namespace {
constexpr int64_t kThreads = 128, kPerThread = 4, kStage = 4096;  // as in metal/vq.h
// metal/vq_quads.h: rows of a codebook; with fewer vectors of each its preparation is not worth it
constexpr int64_t kQuadRows = 256, kQuadVectors = 256;
}  // namespace

Launch quantize_vq_launch(const mx::array& x, const mx::array& codebook, const mx::array& codes) {
  auto p = vq_params("quantize_vq", x.shape(), codebook.shape(), false);
  require(p.dims <= kStage, "quantize_vq", "the GPU kernel takes codebook rows of up to ", kStage,
          " values, but got ", p.dims, ".");
  const bool held = p.dims == 8 || (codes.dtype() == mx::uint8 && (p.dims == 2 || p.dims == 4));
  const int64_t books = (p.per_head ? p.heads : 1) * (p.per_group ? p.groups : 1);
  const int64_t each = p.outer * p.heads * p.seq * p.groups / books;
  const bool quads =
      backend::quad_matrices() && held && p.rows <= kQuadRows && each >= kQuadVectors;
  p.threadgroups = static_cast<int>(groups(each, quads ? kThreads : kThreads * kPerThread));
  Launch l;
  l.kernel = quads ? KernelName("quantize_vq_quads", dtype_name(x.dtype()), p.dims)
                   : KernelName("quantize_vq", dtype_name(x.dtype()), dtype_name(codes.dtype()),
                                held ? p.dims : 0);
  l.inputs = arrays(x, codebook);
  l.outputs = arrays(codes);
  l.params.set(p);
  l.grid = {static_cast<uint32_t>(p.threadgroups), groups(books, 1), 1};
  l.cuda_resident = quads;
  l.threads = kThreads;
  return l;
}

Launch dequantize_vq_launch(const mx::array& codes, const mx::array& codebook,
                            const mx::array& out) {
  auto p = vq_params("dequantize_vq", codes.shape(), codebook.shape(), true);
  Launch l;
  l.kernel = KernelName("dequantize_vq", dtype_name(out.dtype()), dtype_name(codes.dtype()));
  l.inputs = arrays(codes, codebook);
  l.outputs = arrays(out);
  l.params.set(p);
  l.grid = {groups(codes.size(), kThreads), 1, 1};
  l.threads = kThreads;
  return l;
}

}  // namespace vqkv

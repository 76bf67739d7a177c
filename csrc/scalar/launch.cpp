#include "scalar/op.h"
#include "scalar/primitive.h"

namespace vqkv {
namespace {

constexpr int64_t kThreads = 256, kPerThread = 8, kOctets = 8;  // as in metal/scalar.h

/** `octets` of them per thread. */
Launch launch(const KernelName& kernel, const Arrays& inputs, const mx::array& output,
              const mx::Shape& entries, int bits, int64_t octets = 1) {
  auto p = scalar_params(entries, bits);
  p.wide = p.rows == 1 && bits <= 4 && octets > 1 && aligned(*inputs[0]);
  Launch l;
  l.kernel = kernel;
  l.inputs = inputs;
  l.outputs = arrays(output);
  l.params.set(p);
  l.grid = {groups(p.rows * ((p.n + kPerThread - 1) / kPerThread), octets * kThreads), 1, 1};
  l.threads = kThreads;
  return l;
}

}  // namespace

Launch pack_bits_launch(const mx::array& indices, const mx::array& packed, int bits) {
  return launch(KernelName("pack_bits", dtype_name(indices.dtype())), arrays(indices), packed,
                indices.shape(), bits, kOctets);
}

Launch unpack_bits_launch(const mx::array& packed, const mx::array& indices, int bits) {
  return launch(KernelName("unpack_bits", dtype_name(indices.dtype())), arrays(packed), indices,
                indices.shape(), bits, kOctets);
}

Launch quantize_scalar_launch(const mx::array& x, const mx::array& centroids,
                              const mx::array& packed, int bits) {
  return launch(KernelName("quantize_scalar", dtype_name(x.dtype())), arrays(x, centroids), packed,
                x.shape(), bits);
}

Launch dequantize_scalar_launch(const mx::array& packed, const mx::array& centroids,
                                const mx::array& out, int bits) {
  return launch(KernelName("dequantize_scalar", dtype_name(out.dtype())), arrays(packed, centroids),
                out, out.shape(), bits);
}

}  // namespace vqkv

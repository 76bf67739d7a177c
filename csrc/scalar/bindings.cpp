#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include "scalar/op.h"

namespace vqkv {

namespace nb = nanobind;
using namespace nb::literals;

void bind_scalar(nb::module_& m) {
  m.def("pack_bits", &pack_bits, "indices"_a, "bits"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def pack_bits(indices: mlx.core.array, bits: int, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
  m.def("unpack_bits", &unpack_bits, "packed"_a, "bits"_a, "n"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def unpack_bits(packed: mlx.core.array, bits: int, n: int, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
  m.def("quantize_scalar", &quantize_scalar, "x"_a, "centroids"_a, "bits"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def quantize_scalar(x: mlx.core.array, centroids: mlx.core.array, bits: int, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
  m.def("dequantize_scalar", &dequantize_scalar, "packed"_a, "centroids"_a, "bits"_a, "n"_a,
        "dtype"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def dequantize_scalar(packed: mlx.core.array, centroids: mlx.core.array, "
                "bits: int, n: int, dtype: mlx.core.Dtype | None = None, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
}

}  // namespace vqkv

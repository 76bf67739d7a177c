#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "vq/op.h"

namespace vqkv {

namespace nb = nanobind;
using namespace nb::literals;

void bind_vq(nb::module_& m) {
  m.def("quantize_vq", &quantize_vq, "x"_a, "codebook"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def quantize_vq(x: mlx.core.array, codebook: mlx.core.array, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
  m.def("dequantize_vq", &dequantize_vq, "codes"_a, "codebook"_a, "dtype"_a = nb::none(),
        nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def dequantize_vq(codes: mlx.core.array, codebook: mlx.core.array, "
                "dtype: mlx.core.Dtype | None = None, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
  m.def("fake_quantize_vq", &fake_quantize_vq, "x"_a, "codebook"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def fake_quantize_vq(x: mlx.core.array, codebook: mlx.core.array, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
}

}  // namespace vqkv

#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "hadamard/op.h"

namespace vqkv {

namespace nb = nanobind;
using namespace nb::literals;

void bind_hadamard(nb::module_& m) {
  m.def(
      "hadamard",
      [](const mx::array& x, const mx::array& signs, bool inverse, std::optional<mx::Dtype> dtype,
         mx::StreamOrDevice s) {
        return hadamard(x, signs, inverse, dtype.value_or(mx::float32), s);
      },
      "x"_a, "signs"_a, "inverse"_a = false, "dtype"_a = nb::none(), nb::kw_only(),
      "stream"_a = nb::none(),
      nb::sig("def hadamard(x: mlx.core.array, signs: mlx.core.array, inverse: bool = False, "
              "dtype: mlx.core.Dtype | None = None, *, "
              "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
  m.def("hadamard_quantize", &hadamard_quantize, "x"_a, "signs"_a, "centroids"_a, "bits"_a,
        nb::kw_only(), "scale"_a = "mse", "block"_a = nb::none(), "centres"_a = nb::none(),
        "centre_scales"_a = nb::none(), "stream"_a = nb::none(),
        nb::sig("def hadamard_quantize(x: mlx.core.array, signs: mlx.core.array, "
                "centroids: mlx.core.array, bits: int, *, scale: str = 'mse', "
                "block: int | None = None, centres: mlx.core.array | None = None, "
                "centre_scales: mlx.core.array | None = None, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) "
                "-> list[mlx.core.array]"));
}

}  // namespace vqkv

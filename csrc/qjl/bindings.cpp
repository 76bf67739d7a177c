#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "qjl/op.h"

namespace vqkv {

namespace nb = nanobind;
using namespace nb::literals;

void bind_qjl(nb::module_& m) {
  m.def("qjl_encode", &qjl_encode, "x"_a, "sketch"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def qjl_encode(x: mlx.core.array, sketch: mlx.core.array, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) "
                "-> list[mlx.core.array]"));
  m.def("qjl_inner_product", &qjl_inner_product, "q"_a, "sketch"_a, "signs"_a, "norms"_a,
        nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def qjl_inner_product(q: mlx.core.array, sketch: mlx.core.array, "
                "signs: mlx.core.array, norms: mlx.core.array, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
}

}  // namespace vqkv

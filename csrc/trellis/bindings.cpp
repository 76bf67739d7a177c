#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "trellis/op.h"

namespace vqkv {

namespace nb = nanobind;
using namespace nb::literals;

void bind_trellis(nb::module_& m) {
  m.def("trellis_encode", &trellis_encode, "x"_a, "table"_a, "bits"_a, nb::kw_only(),
        "scale"_a = "matched", "stream"_a = nb::none(),
        nb::sig("def trellis_encode(x: mlx.core.array, table: mlx.core.array, bits: int, *, "
                "scale: str = 'matched', "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) "
                "-> list[mlx.core.array]"));
}

}  // namespace vqkv

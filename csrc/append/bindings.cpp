#include "bindings.h"

#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "append/op.h"

namespace vqkv {

namespace nb = nanobind;
using namespace nb::literals;

void bind_append(nb::module_& m) {
  m.def("append_tokens", &append_tokens, "held_keys"_a, "held_values"_a, "keys"_a, "values"_a,
        "at"_a, nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def append_tokens(held_keys: mlx.core.array, held_values: mlx.core.array, "
                "keys: mlx.core.array, values: mlx.core.array, at: int, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) "
                "-> list[mlx.core.array]"));
}

}  // namespace vqkv

#include "bindings.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "attention/op.h"

namespace vqkv {

namespace nb = nanobind;
using namespace nb::literals;

void bind_attention(nb::module_& m) {
  nb::class_<Coded>(m, "Coded")
      .def(
          "__init__",
          [](Coded* self, const mx::array& codes, const mx::array& table, int stride,
             std::optional<mx::array> scales, std::optional<mx::array> centres,
             std::optional<mx::array> centre_scales, const Coded* pair) {
            new (self) Coded{codes,
                             table,
                             stride,
                             scales,
                             centres,
                             centre_scales,
                             pair ? std::make_shared<Coded>(*pair) : nullptr};
          },
          "codes"_a, "table"_a, "stride"_a, "scales"_a = nb::none(), "centres"_a = nb::none(),
          "centre_scales"_a = nb::none(), "pair"_a = nb::none(),
          nb::sig(
              "def __init__(self, codes: mlx.core.array, table: mlx.core.array, stride: int, "
              "scales: mlx.core.array | None = None, centres: mlx.core.array | None = None, "
              "centre_scales: mlx.core.array | None = None, pair: Coded | None = None) -> None"));
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(
          "__init__",
          [](AttentionPlan* self, const Coded& keys, const Coded& values, int sink_tokens,
             int window, int block, std::optional<mx::array> key_diagonal,
             std::optional<mx::array> value_diagonal) {
            new (self) AttentionPlan{
                keys, values, {sink_tokens, window, block}, key_diagonal, value_diagonal};
          },
          "keys"_a, "values"_a, "sink_tokens"_a, "window"_a, "block"_a, "key_diagonal"_a.none(),
          "value_diagonal"_a.none(),
          nb::sig("def __init__(self, keys: Coded, values: Coded, sink_tokens: int, window: int, "
                  "block: int, key_diagonal: mlx.core.array | None, value_diagonal: "
                  "mlx.core.array | None) -> None"))
      .def("__call__", &AttentionPlan::operator(), "q"_a, "layout"_a, "k_tail"_a, "v_tail"_a,
           "scale"_a, "causal"_a,
           nb::sig("def __call__(self, q: mlx.core.array, layout: mlx.core.array | "
                   "tuple[int, int, int], k_tail: mlx.core.array, v_tail: mlx.core.array, "
                   "scale: float, causal: bool) -> mlx.core.array"));
  m.def(
      "attention",
      [](const mx::array& q, std::optional<mx::array> q_code, const Rows& layout,
         const mx::array& k_tail, const mx::array& v_tail, const Coded& keys, const Coded& values,
         int sink_tokens, int window, int block, float scale, bool causal, bool separate,
         std::optional<mx::array> mask, std::optional<mx::array> sinks,
         std::optional<mx::array> key_diagonal, std::optional<mx::array> value_diagonal,
         mx::StreamOrDevice s) {
        return attention(q, q_code, layout, k_tail, v_tail, keys, values,
                         {sink_tokens, window, block},
                         {scale, causal, separate, mask, sinks, key_diagonal, value_diagonal}, s);
      },
      "q"_a, "q_code"_a.none(), "layout"_a, "k_tail"_a, "v_tail"_a, "keys"_a, "values"_a,
      nb::kw_only(), "sink_tokens"_a, "window"_a, "block"_a, "scale"_a, "causal"_a = false,
      "separate"_a = false, "mask"_a = nb::none(), "sinks"_a = nb::none(),
      "key_diagonal"_a = nb::none(), "value_diagonal"_a = nb::none(), "stream"_a = nb::none(),
      nb::sig("def attention(q: mlx.core.array, q_code: mlx.core.array | None, layout: "
              "mlx.core.array | tuple[int, int, int], k_tail: mlx.core.array, v_tail: "
              "mlx.core.array, keys: Coded, "
              "values: Coded, *, sink_tokens: int, window: int, block: int, scale: float, causal: "
              "bool = False, separate: bool = False, mask: mlx.core.array | None = None, sinks: "
              "mlx.core.array | None = None, key_diagonal: mlx.core.array | None = None, "
              "value_diagonal: mlx.core.array | None = None, stream: mlx.core.Stream | "
              "mlx.core.Device | None = None) -> list[mlx.core.array]"));
}

}  // namespace vqkv

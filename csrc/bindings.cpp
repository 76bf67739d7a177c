// nanobind only: names, defaults and signatures. Documentation lives in vqkv_ext/ops.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "attention/op.h"
#include "backend/backend.h"
#include "parallel.h"
#include "reference.h"
#include "vq/op.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// vqkv_ext.reference is looked up at each call, so the hook holds no Python object.
std::vector<mlx::core::array> call_reference(const std::string& op,
                                             const std::vector<mlx::core::array>& inputs,
                                             const vqkv::Scalars& scalars) {
  nb::gil_scoped_acquire gil;
  nb::list args;
  for (const auto& a : inputs) {
    args.append(nb::cast(a));
  }
  nb::dict kwargs;
  for (const auto& [name, value] : scalars) {
    kwargs[name.c_str()] = value;
  }
  nb::object table = nb::module_::import_("vqkv_ext.reference").attr("PRIMITIVES");
  return nb::cast<std::vector<mlx::core::array>>(table[op.c_str()](*args, **kwargs));
}

}  // namespace

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // registers the type casters of array, Dtype and Stream
  vqkv::set_reference_hook(call_reference);

  m.attr("mlx_version") = VQKV_MLX_VERSION;
  m.def("gpu_executor", &vqkv::backend::gpu_executor, nb::sig("def gpu_executor() -> str"));
  m.def("kernel_library", &vqkv::backend::kernel_library, nb::sig("def kernel_library() -> str"));
  m.def("has_simulator", &vqkv::backend::has_simulator, nb::sig("def has_simulator() -> bool"));
  m.def("simulated", &vqkv::backend::simulated, nb::sig("def simulated() -> bool"));
  m.def("simulator_kernels", &vqkv::backend::simulator_kernels,
        nb::sig("def simulator_kernels() -> list[str]"));
  m.def("simulator_executed", &vqkv::backend::simulator_executed,
        nb::sig("def simulator_executed() -> list[str]"));
  m.def("cpu_isa", &vqkv::cpu_isa, nb::sig("def cpu_isa() -> str"));

  m.def("quantize_vq", &vqkv::quantize_vq, "x"_a, "codebook"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def quantize_vq(x: mlx.core.array, codebook: mlx.core.array, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
  m.def("dequantize_vq", &vqkv::dequantize_vq, "codes"_a, "codebook"_a, "dtype"_a = nb::none(),
        nb::kw_only(), "stream"_a = nb::none(),
        nb::sig("def dequantize_vq(codes: mlx.core.array, codebook: mlx.core.array, "
                "dtype: mlx.core.Dtype | None = None, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));
  m.def("fake_quantize_vq", &vqkv::fake_quantize_vq, "x"_a, "codebook"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        nb::sig("def fake_quantize_vq(x: mlx.core.array, codebook: mlx.core.array, *, "
                "stream: mlx.core.Stream | mlx.core.Device | None = None) -> mlx.core.array"));

  nb::class_<vqkv::Coded>(m, "Coded")
      .def(
          "__init__",
          [](vqkv::Coded* self, const mlx::core::array& codes, const mlx::core::array& table,
             int stride, std::optional<mlx::core::array> scales,
             std::optional<mlx::core::array> centres,
             std::optional<mlx::core::array> centre_scales) {
            new (self) vqkv::Coded{codes, table, stride, scales, centres, centre_scales};
          },
          "codes"_a, "table"_a, "stride"_a, "scales"_a = nb::none(), "centres"_a = nb::none(),
          "centre_scales"_a = nb::none(),
          nb::sig("def __init__(self, codes: mlx.core.array, table: mlx.core.array, stride: int, "
                  "scales: mlx.core.array | None = None, centres: mlx.core.array | None = None, "
                  "centre_scales: mlx.core.array | None = None) -> None"));
  m.def(
      "attention",
      [](const mlx::core::array& q, const mlx::core::array& q_code, const mlx::core::array& layout,
         const mlx::core::array& k_tail, const mlx::core::array& v_tail, const vqkv::Coded& keys,
         const vqkv::Coded& values, int sink_tokens, int window, int block, float scale,
         bool causal, bool separate, mlx::core::StreamOrDevice s) {
        return vqkv::attention(q, q_code, layout, k_tail, v_tail, keys, values,
                               {sink_tokens, window, block}, scale, causal, separate, s);
      },
      "q"_a, "q_code"_a, "layout"_a, "k_tail"_a, "v_tail"_a, "keys"_a, "values"_a, nb::kw_only(),
      "sink_tokens"_a, "window"_a, "block"_a, "scale"_a, "causal"_a = false, "separate"_a = false,
      "stream"_a = nb::none(),
      nb::sig("def attention(q: mlx.core.array, q_code: mlx.core.array, layout: mlx.core.array, "
              "k_tail: mlx.core.array, v_tail: mlx.core.array, keys: Coded, values: Coded, *, "
              "sink_tokens: int, window: int, block: int, scale: float, causal: bool = False, "
              "separate: bool = False, stream: mlx.core.Stream | mlx.core.Device | None = None) "
              "-> list[mlx.core.array]"));
}

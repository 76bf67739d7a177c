// nanobind only: names, defaults and signatures. Documentation lives in vqkv_ext/ops.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "backend/backend.h"
#include "bindings.h"
#include "parallel.h"
#include "reference.h"

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
  m.def("has_kernels", &vqkv::backend::has_kernels, nb::sig("def has_kernels() -> bool"));
  m.def("kernel_library", &vqkv::backend::kernel_library, nb::sig("def kernel_library() -> str"));
  m.def("has_simulator", &vqkv::backend::has_simulator, nb::sig("def has_simulator() -> bool"));
  m.def("simulated", &vqkv::backend::simulated, nb::sig("def simulated() -> bool"));
  m.def("simulator_kernels", &vqkv::backend::simulator_kernels,
        nb::sig("def simulator_kernels() -> list[str]"));
  m.def("simulator_executed", &vqkv::backend::simulator_executed,
        nb::sig("def simulator_executed() -> list[str]"));
  m.def("cpu_isa", &vqkv::cpu_isa, nb::sig("def cpu_isa() -> str"));

  vqkv::bind_append(m);
  vqkv::bind_vq(m);
  vqkv::bind_attention(m);
  vqkv::bind_hadamard(m);
  vqkv::bind_scalar(m);
  vqkv::bind_qjl(m);
  vqkv::bind_trellis(m);
}

// Each family binds its own ops.
#pragma once

#include <nanobind/nanobind.h>

namespace vqkv {

void bind_append(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_hadamard(nanobind::module_& m);
void bind_qjl(nanobind::module_& m);
void bind_scalar(nanobind::module_& m);
void bind_trellis(nanobind::module_& m);
void bind_vq(nanobind::module_& m);

}  // namespace vqkv

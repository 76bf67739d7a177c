// Gradients and vmap of ops that have no hand-written rule go through their plain-mlx twin in
// vqkv_ext/reference.py. The bindings install the hook; it may be called from any thread.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common.h"

namespace vqkv {

/** Scalars a primitive carries; they reach the reference as keyword arguments. */
using Scalars = std::map<std::string, double>;

using ReferenceHook = std::function<std::vector<mx::array>(
    const std::string& op, const std::vector<mx::array>& inputs, const Scalars& scalars)>;

using ArrayFunction = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

void set_reference_hook(ReferenceHook hook);

/** The reference of `op` as a function of its array inputs. */
ArrayFunction reference(std::string op, Scalars scalars);

/** A function of the inputs `which` of `f`; the others stay those of `all`. */
ArrayFunction reference_in(ArrayFunction f, std::vector<mx::array> all, std::vector<int> which);

}  // namespace vqkv

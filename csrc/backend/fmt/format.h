// MLX's CUDA headers include {fmt}, which its wheel does not bring, for the message of an error in
// a template that this package does not instantiate.
#pragma once

#include <string>

namespace fmt {

template <typename... Arguments>
std::string format(const char* format, const Arguments&... arguments);

}  // namespace fmt

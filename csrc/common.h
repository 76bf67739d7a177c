// What every family needs: the mlx namespace alias and uniform errors.
#pragma once

#include <sstream>
#include <stdexcept>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace vqkv {
namespace mx = mlx::core;

template <typename... Parts>
std::string message(const char* op, const Parts&... parts) {
  std::ostringstream out;
  out << "[" << op << "] ";
  (out << ... << parts);
  return out.str();
}

/** Raise std::invalid_argument (Python: ValueError) unless `ok`. */
template <typename... Parts>
void require(bool ok, const char* op, const Parts&... parts) {
  if (!ok) {
    throw std::invalid_argument(message(op, parts...));
  }
}

inline bool is_float(mx::Dtype t) {
  return t == mx::float32 || t == mx::float16 || t == mx::bfloat16;
}

}  // namespace vqkv

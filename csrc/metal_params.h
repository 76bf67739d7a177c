// The structs that kernels and host share, inside the project's namespace.
#pragma once

namespace vqkv {
#include "../metal/params.h"
}

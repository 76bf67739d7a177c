// As much of the macOS header of this name as MLX and metal-cpp need to compile.
#pragma once

#include <cstddef>
#include <cstdint>

typedef double CFTimeInterval;

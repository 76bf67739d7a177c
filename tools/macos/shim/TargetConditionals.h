// As much of the macOS header of this name as MLX and metal-cpp need to compile.
#pragma once

#define TARGET_OS_MAC 1
#define TARGET_OS_OSX 1
#define TARGET_OS_IPHONE 0

// As much of the macOS header of this name as MLX and metal-cpp need to compile.
#pragma once

#include <objc/runtime.h>

// Declared without parameters, as Apple does: callers cast it to the type of the method.
extern "C" void objc_msgSend(void);

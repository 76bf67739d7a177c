// Declarations of a macOS system header, as many as MLX and metal-cpp need to compile.
#pragma once
#include "runtime.h"
extern "C" { void objc_msgSend(void); void objc_msgSend_stret(void); void objc_msgSend_fpret(void); }

// Declarations of a macOS system header, as many as MLX and metal-cpp need to compile.
#pragma once
#include <cstddef>
#include <cstdint>
typedef double CFTimeInterval; typedef const struct __CFString* CFStringRef; typedef const void* CFTypeRef;
typedef unsigned long UInteger_; 
#define CF_EXPORT extern
#define CFSTR(s) ((CFStringRef)(s))

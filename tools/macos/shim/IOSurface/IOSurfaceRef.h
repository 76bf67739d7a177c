// Declarations of a macOS system header, as many as MLX and metal-cpp need to compile.
#pragma once
typedef struct __IOSurface* IOSurfaceRef;

// Declarations of a macOS system header, as many as MLX and metal-cpp need to compile.
#pragma once
struct CGSize{double width,height;}; struct CGPoint{double x,y;}; struct CGRect{CGPoint origin; CGSize size;};

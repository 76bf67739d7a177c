// Declarations of a macOS system header, as many as MLX and metal-cpp need to compile.
#pragma once
typedef struct dispatch_queue_s* dispatch_queue_t; typedef struct dispatch_data_s* dispatch_data_t;

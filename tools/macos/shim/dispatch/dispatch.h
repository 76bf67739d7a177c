// As much of the macOS header of this name as MLX and metal-cpp need to compile.
#pragma once

typedef struct dispatch_queue_s* dispatch_queue_t;
typedef struct dispatch_data_s* dispatch_data_t;

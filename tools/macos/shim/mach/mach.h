// As much of the macOS header of this name as MLX and metal-cpp need to compile.
#pragma once

typedef int kern_return_t;
typedef unsigned int mach_port_t;
typedef mach_port_t task_id_token_t;

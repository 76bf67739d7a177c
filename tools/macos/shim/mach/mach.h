// Declarations of a macOS system header, as many as MLX and metal-cpp need to compile.
#pragma once
typedef unsigned int kern_return_t; typedef unsigned int task_id_token_t; typedef unsigned int mach_port_t;

#include "hadamard_halves.h"

// Three threadgroups on a core: 80 registers of CUDA's.
#define HADAMARD(D, M)                                                                 \
  instantiate_kernel(hadamard_##D, hadamard, D, M)                                     \
  instantiate_kernel_groups(hadamard_quantize_##D, 256, 3, hadamard_quantize, D, M,    \
                            HADAMARD_LANES(D, M))                                      \
      instantiate_kernel(hadamard_quantize_blocks_##D, hadamard_quantize_blocks, D, M, \
                         HADAMARD_LANES(D, M))

HADAMARD(1, 1)
HADAMARD(2, 1)
HADAMARD(4, 1)
HADAMARD(8, 1)
HADAMARD(16, 1)
HADAMARD(32, 1)
HADAMARD(64, 1)
HADAMARD(128, 1)
HADAMARD(256, 1)
HADAMARD(512, 1)
HADAMARD(1024, 1)
HADAMARD(12, 12)
HADAMARD(24, 12)
HADAMARD(48, 12)
HADAMARD(96, 12)
HADAMARD(192, 12)
HADAMARD(384, 12)
HADAMARD(768, 12)
HADAMARD(20, 20)
HADAMARD(40, 20)
HADAMARD(80, 20)
HADAMARD(160, 20)
HADAMARD(320, 20)
HADAMARD(640, 20)
HADAMARD(28, 28)
HADAMARD(56, 28)
HADAMARD(112, 28)
HADAMARD(224, 28)
HADAMARD(448, 28)
HADAMARD(896, 28)

// Registers for as many threadgroups as spill nothing.
#define HALVES(D, GROUPS)                                                                     \
  instantiate_kernel_groups(hadamard_quantize_halves_##D, 32 * HADAMARD_HALVES_SIMDS, GROUPS, \
                            hadamard_quantize_halves, D)

HALVES(32, 6)
HALVES(64, 6)
HALVES(128, 5)

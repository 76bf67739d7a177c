// The stored Hadamard matrices of orders 12, 20 and 28.
#pragma once

#include "hadamard_tables.h"
#include "prelude.h"

program_constant(uint, hadamard_12, 12) = {HADAMARD_12};
program_constant(uint, hadamard_20, 20) = {HADAMARD_20};
program_constant(uint, hadamard_28, 28) = {HADAMARD_28};

// Row i of the matrix of order M: bit j is set where its entry is +1.
METAL_FUNC uint hadamard_matrix_row(int order, int i) {
  return order == 12   ? hadamard_12[i % 12]
         : order == 20 ? hadamard_20[i % 20]
                       : hadamard_28[i % 28];
}

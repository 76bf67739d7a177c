#include "trellis.h"

// by bits per value
instantiate_kernel(trellis_encode_1, trellis_encode, 1)
instantiate_kernel(trellis_encode_2, trellis_encode, 2)
instantiate_kernel(trellis_encode_3, trellis_encode, 3)
instantiate_kernel(trellis_encode_4, trellis_encode, 4)

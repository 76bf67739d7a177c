// attention_prefill where some simdgroups only decode, for test_prefill_producers.py.
#ifndef TILE_PRODUCERS
#define TILE_PRODUCERS 4
#endif
#include "../../metal/attention_prefill.h"

instantiate_kernel_groups(prefill_2, PREFILL_THREADS, 1, attention_prefill, half, 64, 2)
instantiate_kernel_groups(prefill_4, PREFILL_THREADS, 1, attention_prefill, half, 64, 4)
instantiate_kernel_groups(prefill_trellis3, PREFILL_THREADS, 1, attention_prefill, half, 64,
                          TRELLIS_CODE(3))
instantiate_kernel_groups(prefill_trellis, PREFILL_THREADS, 1, attention_prefill, half, 64,
                          TRELLIS_ANY)

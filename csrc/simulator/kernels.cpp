// Every kernel of the library, for the simulator (and, with MSL_CHECK, for the type check).
#include "../../metal/attention.metal"
#include "../../metal/attention_prefill.metal"
#include "../../metal/hadamard.metal"
#include "../../metal/qjl.metal"
#include "../../metal/scalar.metal"
#include "../../metal/trellis.metal"
#include "../../metal/vq.metal"

#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"
#include "parallel.h"

namespace vqkv {
namespace {

const Kernels& choose() {
#ifdef __x86_64__
  // VQKV_CPU_ISA can only lower the choice, so no value meets a missing instruction.
  const char* e = std::getenv("VQKV_CPU_ISA");
  const bool limited = e && std::strcmp(e, "avx2") == 0;
  if (e && std::strcmp(e, "baseline") == 0) {
    return baseline::table;
  }
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !limited) {
    return avx512::table;
  }
  if (has_avx2) {
    return avx2::table;
  }
#endif
  return baseline::table;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const char* cpu_isa() {
  return kernels().isa;
}

}  // namespace vqkv

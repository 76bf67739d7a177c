// Under AddressSanitizer buffers are poisoned to the byte instead of guarded by pages, and every
// switch between stacks is announced.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define VQKV_SIM_ASAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define VQKV_SIM_ASAN 1
#endif

#ifdef VQKV_SIM_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace vqkv::sim {
#ifdef VQKV_SIM_ASAN
constexpr bool kAsan = true;
#else
constexpr bool kAsan = false;
#endif
}  // namespace vqkv::sim

#pragma once

#include "common.h"

namespace vqkv {

/**
 * {keys, values} of held tokens [B, H, T, D] with new ones in slots [at, at + L). What two slice
 * updates do, checked first and built by one call.
 */
std::vector<mx::array> append_tokens(const mx::array& held_keys, const mx::array& held_values,
                                     const mx::array& keys, const mx::array& values, int at,
                                     mx::StreamOrDevice s = {});

}  // namespace vqkv

// Numbers in planes: a coarse one first, then digits to base 3, each coded in the context of
// the magnitude known so far (0, 1, more). A digit is symbol - 128, mirrored where the number
// is negative.
#pragma once

#include "kernels.h"

namespace kvrag::host {

static void magnitude_contexts(const i16* __restrict values, u8* __restrict contexts,
                               u64 count) noexcept {
  for (u64 i = 0; i < count; ++i) {
    const i32 value = values[i];
    const i32 magnitude = value < 0 ? -value : value;
    contexts[i] = static_cast<u8>(magnitude < 2 ? magnitude : 2);
  }
}

// Damaged digits can leave the range of 16 bits: they stop at its ends.
static void refine_values(i16* __restrict values, const u8* __restrict symbols,
                          u64 count) noexcept {
  for (u64 i = 0; i < count; ++i) {
    const i32 value = values[i];
    const i32 digit = symbols[i] - kZeroSymbol;
    const i32 finer = 3 * value + (value < 0 ? -digit : digit);
    values[i] = static_cast<i16>(finer > 32767 ? 32767 : finer < -32767 ? -32767 : finer);
  }
}

}  // namespace kvrag::host

// Refinement of many numbers; kvrag/reconstruct.h describes it.
#pragma once

#include "kernels.h"

namespace kvrag::host {

static void magnitude_contexts(const i16* __restrict values, u8* __restrict contexts,
                               u64 count) noexcept {
  for (u64 i = 0; i < count; ++i) contexts[i] = reconstruct::context_of(values[i]);
}

static void refine_values(i16* __restrict values, const u8* __restrict symbols,
                          u64 count) noexcept {
  for (u64 i = 0; i < count; ++i) values[i] = reconstruct::refined(values[i], symbols[i]);
}

}  // namespace kvrag::host

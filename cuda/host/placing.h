// The last step of every reconstruction: rotate one token's channels, round them, store them.
#pragma once

#include "kernels.h"

namespace kvrag::host {

template <class Element, class Round>
static inline void write_row(const float* channels, u64 count, Element* out, Round round) {
  for (u64 i = 0; i < count; ++i) out[i] = round(channels[i]);
}

// `channels` [head_dim] is overwritten; `token` counts from the placement's first.
static inline void place_row(float* __restrict channels, u64 head, u64 token,
                             const Placement& placement) {
  if (placement.num_rotated != 0) {
    const u64 half = placement.num_rotated / 2;
    const float* __restrict cos = placement.cos + static_cast<i64>(token) * placement.cos_stride;
    const float* __restrict sin = placement.sin + static_cast<i64>(token) * placement.sin_stride;
    float* __restrict second_half = channels + half;
    for (u64 i = 0; i < half; ++i) {
      const float first = channels[i];
      const float second = second_half[i];
      channels[i] = reconstruct::rotate_first(first, second, cos[i], sin[i]);
      second_half[i] = reconstruct::rotate_second(first, second, cos[i], sin[i]);
    }
  }
  const i64 place = static_cast<i64>(head) * placement.head_stride +
                    static_cast<i64>(token) * placement.token_stride;
  switch (placement.type) {
    case ElementType::f32:
      std::memcpy(static_cast<float*>(placement.out) + place, channels,
                  placement.head_dim * sizeof(float));
      break;
    case ElementType::bf16:
      write_row(channels, placement.head_dim, static_cast<u16*>(placement.out) + place,
                reconstruct::to_bf16);
      break;
    case ElementType::f16:
      write_row(channels, placement.head_dim, static_cast<u16*>(placement.out) + place,
                reconstruct::to_f16);
      break;
  }
}

}  // namespace kvrag::host

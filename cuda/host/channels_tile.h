// Up to 32 tokens of rows that are channels already: scale, transpose, place.
#pragma once

#include "numbers.h"
#include "placing.h"

namespace kvrag::host {

static void channels_tile(const Numbers& numbers, const Channels& factors,
                          const Placement& placement, u64 begin, u64 end, float* scratch) noexcept {
  const u64 head_dim = placement.head_dim;
  const u64 count = end - begin;
  const u64 first_token = placement.first_token + begin;
  float* const by_channel = scratch;  // [head_dim, kTileTokens]
  float* const by_token = scratch + kTileTokens * head_dim;
  const u64 first = first_patch(numbers, first_token);
  const u64 last = first_patch(numbers, first_token + count);

  for (u64 head = 0; head < placement.num_heads; ++head) {
    const u64 first_row = head * head_dim;
    for (u64 d = 0; d < head_dim; ++d) {
      for (u64 token = 0; token < count; token += 8) {
        const u64 left = count - token;
        Floats8 points;
        if (!read_points(numbers, first_row + d, first_token + token, left < 8 ? left : 8,
                         points)) {
          points = Floats8{};
        }
        store(by_channel + d * kTileTokens + token, points);
      }
    }
    for (u64 i = first; i < last; ++i) {
      const u64 row = numbers.patch_rows[i];
      if (row < first_row || row >= first_row + head_dim) continue;
      by_channel[(row - first_row) * kTileTokens + numbers.patch_tokens[i] - first_token] =
          numbers.patch_values[i];
    }
    for (u64 d = 0; d < head_dim; ++d) {
      const u64 row = first_row + d;
      float* line = by_channel + d * kTileTokens;
      if (factors.row_scale != nullptr) {
        for (u64 t = 0; t < count; ++t) line[t] *= factors.row_scale[row];
      }
      if (factors.token_scale != nullptr) {
        for (u64 t = 0; t < count; ++t) line[t] *= factors.token_scale[first_token + t];
      }
      if (factors.addend != nullptr) {
        const float* addend = factors.addend + static_cast<i64>(row) * factors.addend_stride +
                              static_cast<i64>(first_token);
        for (u64 t = 0; t < count; ++t) line[t] += addend[t];
      }
    }
    for (u64 t = 0; t < count; ++t) {
      float* channels = by_token + t * head_dim;
      for (u64 d = 0; d < head_dim; ++d) channels[d] = by_channel[d * kTileTokens + t];
      place_row(channels, head, begin + t, placement);
    }
  }
}

}  // namespace kvrag::host

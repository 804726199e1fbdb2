// Inverse transform of up to 32 tokens.
//
// The tile's points are laid out in panels of 8 tokens, one line of 8 floats for each row. Rows
// that are zero in all 8 tokens, which most are at low rates, are left out and cost nothing
// further. Then, for each head and panel, channels accumulate in registers over the panel's rows.
#pragma once

#include "numbers.h"
#include "placing.h"
#include "vectors.h"

namespace kvrag::host {

// Rows of one panel that are not zero everywhere: `points` [count, 8], `rows` [count].
struct Panel {
  float* points;
  u32* rows;
  u64 count;
};

// Compute kVectors vectors of channels for kTokens tokens. `basis` and `mean` point to the first
// channel, `out` to that of the first token; their rows are `head_dim` apart.
template <u32 kWidth, u32 kVectors, u32 kTokens>
static inline void multiply(const Panel& panel, u32 first_token, const float* basis,
                            const float* mean, u64 head_dim, float* out) {
  using Vector = typename VectorOf<kWidth>::Type;
  Vector sums[kTokens][kVectors];
  for (u32 t = 0; t < kTokens; ++t) {
    for (u32 v = 0; v < kVectors; ++v) sums[t][v] = load<Vector>(mean + v * kWidth);
  }
  const float* points = panel.points + first_token;
  for (u64 k = 0; k < panel.count; ++k, points += kPanelTokens) {
    const float* row = basis + u64{panel.rows[k]} * head_dim;
    Vector weights[kVectors];
#pragma GCC unroll 8
    for (u32 v = 0; v < kVectors; ++v) weights[v] = load<Vector>(row + v * kWidth);
#pragma GCC unroll 8
    for (u32 t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (u32 v = 0; v < kVectors; ++v) sums[t][v] += points[t] * weights[v];
    }
  }
  for (u32 t = 0; t < kTokens; ++t) {
    for (u32 v = 0; v < kVectors; ++v) store(out + t * head_dim + v * kWidth, sums[t][v]);
  }
}

template <u32 kWidth, u32 kVectors, u32 kTokens>
static inline void multiply_panel(const Panel& panel, const float* basis, const float* mean,
                                  u64 head_dim, float* out) {
  for (u32 t = 0; t < kPanelTokens; t += kTokens) {
    multiply<kWidth, kVectors, kTokens>(panel, t, basis, mean, head_dim, out + t * head_dim);
  }
}

// Compute all channels of one head.
static inline void multiply_head(const Panel& panel, const float* basis, const float* mean,
                                 u64 head_dim, float* out) {
  constexpr u32 kWidth = KVRAG_FLOATS;
  u64 d = 0;
  for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
    multiply_panel<kWidth, 2, KVRAG_TOKENS>(panel, basis + d, mean + d, head_dim, out + d);
  }
  for (; d + kWidth <= head_dim; d += kWidth) {
    multiply_panel<kWidth, 1, 8>(panel, basis + d, mean + d, head_dim, out + d);
  }
  if constexpr (kWidth == 16) {
    for (; d + 8 <= head_dim; d += 8) {
      multiply_panel<8, 1, 8>(panel, basis + d, mean + d, head_dim, out + d);
    }
  }
  for (; d < head_dim; ++d) {
    multiply_panel<1, 1, 8>(panel, basis + d, mean + d, head_dim, out + d);
  }
}

static inline void fill_panels(const Numbers& numbers, u64 first_token, u64 num_tokens,
                               Panel* panels) {
  for (u64 row = 0; row < numbers.num_rows; ++row) {
    Panel* panel = panels;
    for (u64 token = 0; token < num_tokens; token += kPanelTokens, ++panel) {
      const u64 left = num_tokens - token;
      Floats8 points;
      if (!read_points(numbers, row, first_token + token, left < 8 ? left : 8, points)) continue;
      store(panel->points + panel->count * kPanelTokens, points);
      panel->rows[panel->count++] = static_cast<u32>(row);
    }
  }
}

// Replace points; `lines` [num_rows] is scratch.
static inline void patch_panels(const Numbers& numbers, u64 first_token, u64 num_tokens,
                                Panel* panels, u32* lines) {
  constexpr u32 kNone = ~0u;
  u64 mapped = kNone;
  const u64 end = first_patch(numbers, first_token + num_tokens);
  for (u64 i = first_patch(numbers, first_token); i < end; ++i) {
    const u64 token = numbers.patch_tokens[i] - first_token;
    const u32 row = numbers.patch_rows[i];
    Panel& panel = panels[token / kPanelTokens];
    if (mapped != token / kPanelTokens) {
      mapped = token / kPanelTokens;
      for (u64 r = 0; r < numbers.num_rows; ++r) lines[r] = kNone;
      for (u64 k = 0; k < panel.count; ++k) lines[panel.rows[k]] = static_cast<u32>(k);
    }
    if (lines[row] == kNone) {
      lines[row] = static_cast<u32>(panel.count);
      store(panel.points + panel.count * kPanelTokens, Floats8{});
      panel.rows[panel.count++] = row;
    }
    panel.points[u64{lines[row]} * kPanelTokens + token % kPanelTokens] = numbers.patch_values[i];
  }
}

static void transform_tile(const Numbers& numbers, const Transform& transform,
                           const Placement& placement, u64 begin, u64 end,
                           float* scratch) noexcept {
  constexpr u64 kPanels = kTileTokens / kPanelTokens;
  const u64 num_rows = numbers.num_rows;
  float* const channels = scratch + kTileTokens * num_rows;
  u32* const rows = reinterpret_cast<u32*>(channels + kPanelTokens * placement.head_dim);
  Panel panels[kPanels];
  for (u64 i = 0; i < kPanels; ++i) {
    panels[i] = {scratch + i * kPanelTokens * num_rows, rows + i * num_rows, 0};
  }
  const u64 first_token = placement.first_token + begin;
  fill_panels(numbers, first_token, end - begin, panels);
  if (numbers.num_patches != 0) {
    patch_panels(numbers, first_token, end - begin, panels, rows + kPanels * num_rows);
  }
  const u64 head_dim = placement.head_dim;
  for (u64 head = 0; head < placement.num_heads; ++head) {
    const float* basis = transform.basis + head * num_rows * head_dim;
    const float* mean = transform.mean + head * head_dim;
    for (u64 token = begin; token < end; token += kPanelTokens) {
      multiply_head(panels[(token - begin) / kPanelTokens], basis, mean, head_dim, channels);
      const u64 count = end - token < kPanelTokens ? end - token : kPanelTokens;
      for (u64 t = 0; t < count; ++t) {
        place_row(channels + t * head_dim, head, token + t, placement);
      }
    }
  }
}

}  // namespace kvrag::host

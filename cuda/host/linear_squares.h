// A linear layer over few rows in bfloat16 by the unit that multiplies squares. Weights are its
// rows as they are in memory, and the inputs, a column for each row, its pairs. Columns do not
// touch each other, so a row's bits do not depend on the others.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "kvrag/reconstruct.h"
#include "squares.h"

namespace kvrag::host {
namespace {
namespace linear_squares {

constexpr u64 kSide = 16;         // outputs, and rows at most
constexpr u64 kDeep = 2 * kSide;  // inputs of one product
constexpr u64 kLine = 32;         // weights that memory delivers together
// Floats before the pairs: sums, and the ends of weights.
constexpr u64 kBefore = 2 * kSide * kSide + 2 * kSide * kDeep / 2;
static_assert(kBefore <= kLinearScratch && kDeep <= kLinearRowScratch);

// Inputs in pairs, [depth / 2, num_rows] of two numbers each; what fills the last product is 0.
static inline void lay(const Linear& layer, u64 depth, u32* pairs) {
  const u16* const input = static_cast<const u16*>(layer.input);
  for (u64 row = 0; row < layer.num_rows; ++row) {
    const u16* const from = input + row * layer.num_inputs;
    for (u64 i = 0; i < depth / 2; ++i) {
      u32 pair = 0;
      if (2 * i + 1 < layer.num_inputs) {
        std::memcpy(&pair, from + 2 * i, sizeof pair);
      } else if (2 * i < layer.num_inputs) {
        pair = from[2 * i];
      }
      pairs[i * layer.num_rows + row] = pair;
    }
  }
}

// Sums of 16 outputs, or of twice as many, over all inputs: registers 0 and 1.
template <bool kTwice>
static inline void sum(const u16* weights, u64 stride, const u32* pairs, u64 num_rows, u64 depth,
                       const u16* next) {
  _tile_zero(0);
  if constexpr (kTwice) _tile_zero(1);
  for (u64 at = 0; at < depth; at += kDeep) {
    _tile_loadd(6, pairs + at / 2 * num_rows, num_rows * sizeof *pairs);
    _tile_loadd(4, weights + at, stride * sizeof *weights);
    if constexpr (kTwice) _tile_loadd(5, weights + kSide * stride + at, stride * sizeof *weights);
    // Memory is read in its own order, ahead of the rows that are taken by turns.
    for (u64 line = 0; line < (kTwice ? 2 : 1) * kSide; ++line) {
      _mm_prefetch(reinterpret_cast<const char*>(next + line * kLine), _MM_HINT_T1);
    }
    next += (kTwice ? 2 : 1) * kSide * kLine;
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwice) _tile_dpbf16ps(1, 5, 6);
  }
}

// Outputs [begin, end) of a layer of at least 16.
static inline void outputs(const Linear& layer, u64 begin, u64 end, float* scratch) {
  const u64 rows = layer.num_rows, width = layer.num_inputs;
  const u64 whole = width / kDeep * kDeep, depth = (width + kDeep - 1) / kDeep * kDeep;
  float* const sums = scratch;                                         // [2 * kSide, kSide]
  u16* const ends = reinterpret_cast<u16*>(sums + 2 * kSide * kSide);  // [2 * kSide, kDeep]
  u32* const pairs = reinterpret_cast<u32*>(scratch + kBefore);
  lay(layer, depth, pairs);
  const u16* const weight = static_cast<const u16*>(layer.weight);
  const u16* const bias = static_cast<const u16*>(layer.bias);
  u16* const out = static_cast<u16*>(layer.out);
  const SquareShapes shapes(rows);
  const SquareScope scope(shapes);
  settle(pairs);
  for (u64 output = begin; output < end;) {
    const bool is_twice = end - output > kSide && layer.num_outputs >= 2 * kSide;
    const u64 count = is_twice ? 2 * kSide : kSide;
    // Fewer are left at the end: others are computed again, to the same bits, and not stored.
    const u64 first = std::min(output, layer.num_outputs - count);
    const u16* const weights = weight + first * width;
    const u16* const next = weights + count * width;
    if (is_twice) {
      sum<true>(weights, width, pairs, rows, whole, next);
    } else {
      sum<false>(weights, width, pairs, rows, whole, next);
    }
    if (whole < width) {
      for (u64 i = 0; i < count; ++i) {
        u16* const to = ends + i * kDeep;
        std::memset(to, 0, kDeep * sizeof *to);
        std::memcpy(to, weights + i * width + whole, (width - whole) * sizeof *to);
      }
      settle(ends);
      _tile_loadd(6, pairs + whole / 2 * rows, rows * sizeof *pairs);
      _tile_loadd(4, ends, kDeep * sizeof *ends);
      _tile_dpbf16ps(0, 4, 6);
      if (is_twice) {
        _tile_loadd(5, ends + kSide * kDeep, kDeep * sizeof *ends);
        _tile_dpbf16ps(1, 5, 6);
      }
    }
    _tile_stored(0, sums, rows * sizeof *sums);
    if (is_twice) _tile_stored(1, sums + kSide * rows, rows * sizeof *sums);
    settle(sums);
    const u64 stop = std::min(count, end - first);
    for (u64 i = output - first; i < stop; ++i) {
      const float added = bias == nullptr ? 0.0f : reconstruct::from_bf16(bias[first + i]);
      for (u64 row = 0; row < rows; ++row) {
        out[row * layer.num_outputs + first + i] =
            reconstruct::to_bf16(sums[i * rows + row] + added);
      }
    }
    output = first + count;
  }
}

}  // namespace linear_squares

void linear_squares_tile(const Linear& layer, u64 begin, u64 end, float* scratch) noexcept {
  // Not its share: which kernel computes an output must not depend on the number of threads.
  if (layer.type == ElementType::bf16 && layer.num_outputs >= linear_squares::kSide &&
      layer.num_rows <= linear_squares::kSide) {
    return linear_squares::outputs(layer, begin, end, scratch);
  }
  linear_tile(layer, begin, end, scratch);
}

}  // namespace
}  // namespace kvrag::host

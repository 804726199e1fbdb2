// A linear layer in bfloat16 by the unit that multiplies squares (AMX). It multiplies weights, row
// by row as they lie in memory, by inputs in pairs: each row of inputs is a column. Columns do not
// touch each other, so a row's bits do not depend on the other rows. Weights are read from memory
// once.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "linear_tile.h"
#include "squares.h"
#include "vectors.h"

namespace kvrag::host {
namespace {
namespace linear_squares {

constexpr u64 kSide = 16;         // outputs or rows of a square
constexpr u64 kDeep = 2 * kSide;  // inputs of one product
constexpr u64 kLine = 32;         // weights that memory delivers together
constexpr u64 kRows = 2 * kSide;  // that are multiplied together
constexpr u64 kSquare = kSide * kSide;
// Floats before the pairs: four sums, and the ends of weights.
constexpr u64 kBefore = 4 * kSquare + 2 * kSide * kDeep / 2;
static_assert(kBefore <= kLinearScratch && kDeep <= kLinearRowScratch);

// How many columns a group of up to 16 rows has. With many rows, squares are filled up.
constexpr u64 columns_of(u64 num_rows, u64 group_rows) {
  return num_rows > kRows ? kSide : group_rows;
}

// 32 inputs of 16 rows in pairs, [pairs, rows].
static inline void lay_square(const u16* rows, u64 stride, u32* to) {
  SquareLine lines[kSide];
  for (u64 i = 0; i < kSide; ++i) lines[i] = load<SquareLine>(rows + i * stride);
  transpose_square(lines);
  for (u64 i = 0; i < kSide; ++i) store(to + i * kSide, lines[i]);
}

// Inputs in pairs, a group of 16 rows after the other: [depth / 2, columns of the group] of two
// numbers each. What fills a product or a group is 0.
static inline void lay(const Linear& layer, u64 depth, u32* pairs) {
  const u64 width = layer.num_inputs;
  for (u64 before = 0; before < layer.num_rows; before += kSide) {
    const u16* const rows = static_cast<const u16*>(layer.input) + before * width;
    const u64 count = std::min(kSide, layer.num_rows - before);
    const u64 columns = columns_of(layer.num_rows, count);
    u32* const to = pairs + before * depth / 2;
    u64 laid = 0;
    if (count == kSide) {
      for (; laid + kDeep <= width; laid += kDeep)
        lay_square(rows + laid, width, to + laid / 2 * kSide);
    } else if (columns > count) {
      std::memset(to, 0, columns * depth / 2 * sizeof *to);
    }
    for (u64 row = 0; row < count; ++row) {
      const u16* const from = rows + row * width;
      for (u64 i = laid / 2; i < depth / 2; ++i) {
        u32 pair = 0;
        if (2 * i + 1 < width) {
          std::memcpy(&pair, from + 2 * i, sizeof pair);
        } else if (2 * i < width) {
          pair = from[2 * i];
        }
        to[i * columns + row] = pair;
      }
    }
  }
}

// Where a square's lines are stored: that of one column is a line itself.
constexpr u64 square_stride(u64 columns) { return columns == 1 ? 1 : kSide; }

// A group of rows, or two: their columns, and their pairs.
struct Groups {
  u64 columns[2];
  const u32* pairs[2];
};

// Add products of 32 inputs from `at` on: 16 outputs, or twice as many, by one group or two.
template <bool kTwice, bool kBoth>
static inline void multiply(const u16* weights, u64 stride, const Groups& groups, u64 at) {
  const auto load = [&](u64 group) { return groups.pairs[group] + at / 2 * groups.columns[group]; };
  _tile_loadd(6, load(0), groups.columns[0] * sizeof(u32));
  _tile_loadd(4, weights, stride * sizeof *weights);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kBoth) {
    _tile_loadd(7, load(1), groups.columns[1] * sizeof(u32));
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (kTwice) {
    _tile_loadd(5, weights + kSide * stride, stride * sizeof *weights);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kBoth) _tile_dpbf16ps(3, 5, 7);
  }
}

// Write the sums of 16 outputs, or of twice as many, over all inputs: a square for each register.
// Then `is_first` says whether no other rows were multiplied by these weights before.
template <bool kTwice, bool kBoth>
static inline void sum(const u16* weights, u64 width, const Groups& groups, u16* ends, float* sums,
                       bool is_first) {
  constexpr u64 kCount = (kTwice ? 2 : 1) * kSide;
  const u64 whole = width / kDeep * kDeep;
  // Memory is read in its own order, ahead of the rows that are taken by turns.
  const u16* next = weights + kCount * width;
  const u64 num_lines = is_first ? kCount : 0;
  _tile_zero(0);
  if constexpr (kBoth) _tile_zero(1);
  if constexpr (kTwice) _tile_zero(2);
  if constexpr (kTwice && kBoth) _tile_zero(3);
  for (u64 at = 0; at < whole; at += kDeep) {
    multiply<kTwice, kBoth>(weights + at, width, groups, at);
    for (u64 line = 0; line < num_lines; ++line, next += kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
    }
  }
  if (whole < width) {
    for (u64 i = 0; i < kCount; ++i) {
      u16* const to = ends + i * kDeep;
      std::memset(to, 0, kDeep * sizeof *to);
      std::memcpy(to, weights + i * width + whole, (width - whole) * sizeof *to);
    }
    settle(ends);
    multiply<kTwice, kBoth>(ends, kDeep, groups, whole);
  }
  const auto stride = [&](u64 group) {
    return square_stride(groups.columns[group]) * sizeof *sums;
  };
  _tile_stored(0, sums, stride(0));
  if constexpr (kBoth) _tile_stored(1, sums + kSquare, stride(1));
  if constexpr (kTwice) _tile_stored(2, sums + 2 * kSquare, stride(0));
  if constexpr (kTwice && kBoth) _tile_stored(3, sums + 3 * kSquare, stride(1));
  settle(sums);
}

// Round outputs [low, high) of a square, a column for each row, and write those of `rows`.
static inline void put(const float* sums, u64 columns, u64 rows, const u16* bias, u64 low, u64 high,
                       u16* out, u64 stride) {
  SquareLine lines[kSide];
  for (u64 i = 0; i < (columns == 1 ? 1 : kSide); ++i)
    lines[i] = load<SquareLine>(sums + i * kSide);
  if (columns > 1) transpose_square(lines);
  __m512 added = _mm512_setzero_ps();
  const __mmask16 kept = static_cast<__mmask16>((1u << high) - (1u << low));
  if (bias != nullptr) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(kept, bias));
    added = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  for (u64 row = 0; row < rows; ++row) {
    const __m512 sum = _mm512_castsi512_ps((__m512i)lines[row]) + added;
    _mm256_mask_storeu_epi16(out + row * stride, kept, (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

// Outputs [begin, end) of a layer of at least 16.
static inline void outputs(const Linear& layer, u64 begin, u64 end, float* scratch) {
  const u64 rows = layer.num_rows, width = layer.num_inputs;
  const u64 depth = (width + kDeep - 1) / kDeep * kDeep;
  float* const sums = scratch;
  u16* const ends = reinterpret_cast<u16*>(sums + 4 * kSquare);  // [2 * kSide, kDeep]
  u32* const pairs = reinterpret_cast<u32*>(scratch + kBefore);
  lay(layer, depth, pairs);
  const u16* const weight = static_cast<const u16*>(layer.weight);
  const u16* const bias = static_cast<const u16*>(layer.bias);
  u16* const out = static_cast<u16*>(layer.out);
  const auto groups_of = [&](u64 before) {
    Groups groups{};
    for (u64 group = 0; group < 2; ++group) {
      const u64 first = before + group * kSide;
      groups.columns[group] = first < rows ? columns_of(rows, std::min(kSide, rows - first)) : 0;
      groups.pairs[group] = pairs + first * depth / 2;
    }
    return groups;
  };
  const Groups shape = groups_of(0);
  const SquareShapes shapes(shape.columns[0], std::max<u64>(shape.columns[1], 1));
  const SquareScope scope(shapes);
  settle(pairs);
  for (u64 output = begin; output < end;) {
    const bool is_twice = end - output > kSide && layer.num_outputs >= 2 * kSide;
    const u64 count = is_twice ? 2 * kSide : kSide;
    // Fewer are left at the end: others are computed again, to the same bits, and not stored.
    const u64 first = std::min(output, layer.num_outputs - count);
    for (u64 before = 0; before < rows; before += kRows) {
      const Groups groups = groups_of(before);
      const bool is_both = groups.columns[1] > 0;
      const auto run = is_twice ? (is_both ? sum<true, true> : sum<true, false>)
                                : (is_both ? sum<false, true> : sum<false, false>);
      run(weight + first * width, width, groups, ends, sums, before == 0);
      for (u64 square = 0; square < 4; ++square) {
        const u64 row = before + square % 2 * kSide, from = first + square / 2 * kSide;
        if (row >= rows || from >= first + count) continue;
        const u64 low = std::clamp(output, from, from + kSide) - from;
        const u64 high = std::clamp(end, from, from + kSide) - from;
        put(sums + square * kSquare, groups.columns[square % 2], std::min(kSide, rows - row),
            bias == nullptr ? nullptr : bias + from, low, high,
            out + row * layer.num_outputs + from, layer.num_outputs);
      }
    }
    output = first + count;
  }
}

}  // namespace linear_squares

void linear_squares_tile(const Linear& layer, u64 begin, u64 end, float* scratch) noexcept {
  // Not its share: which kernel computes an output must not depend on the number of threads.
  if (layer.type == ElementType::bf16 && layer.num_outputs >= linear_squares::kSide) {
    return linear_squares::outputs(layer, begin, end, scratch);
  }
  linear_tile(layer, begin, end, scratch);
}

}  // namespace
}  // namespace kvrag::host

// A linear layer over few rows: each weight is read once for all of them, as fast as memory
// delivers.
//
// A few outputs are computed at a time, each the sum of a vector of partial sums. Libraries for
// large matrices first bring weights into another order, which costs as much as reading them again.
#pragma once

#include <utility>

#include "kernels.h"
#include "kvrag/reconstruct.h"
#include "vectors.h"

namespace kvrag::host {
namespace {  // also for members: the linker must never use another instruction set's
namespace linear {

constexpr u32 kWidth = KVRAG_FLOATS;
// Outputs and rows whose sums fit the registers.
constexpr u32 kOutputs = 4;
constexpr u32 kRows = kWidth == 16 ? 5 : 2;

using Floats = VectorOf<kWidth>::Type;
typedef i32 Ints __attribute__((vector_size(4 * KVRAG_FLOATS)));

static inline float value_of(float value) { return value; }

static inline float value_of(u16 bfloat16) { return reconstruct::from_bf16(bfloat16); }

static inline void put(float* to, float value) { *to = value; }
static inline void put(u16* to, float value) { *to = reconstruct::to_bf16(value); }

// Where lane i of a group of two halves comes from: a half of `a`, or of `b` behind it.
constexpr int lane_of_half(int i, int half, int second) {
  return i / (2 * half) * (2 * half) + second * half + i % half +
         i / half % 2 * static_cast<int>(kWidth);
}

// Half as many sums in as many lanes: `a`'s in the first half of each group, `b`'s in the second.
template <u32 kHalf, int... kLane>
static inline Floats fold(const Floats& a, const Floats& b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, lane_of_half(kLane, kHalf, 0)...) +
         __builtin_shufflevector(a, b, lane_of_half(kLane, kHalf, 1)...);
}

template <u32 kHalf>
static inline Floats fold(const Floats& a, const Floats& b) {
  return fold<kHalf>(a, b, std::make_integer_sequence<int, kWidth>());
}

// What a vector sums to in each group of lanes that is `kGroup` wide, in all its lanes.
template <u32 kGroup>
static inline Floats folded(const Floats& sums) {
  if constexpr (kGroup == 1) {
    return sums;
  } else {
    return folded<kGroup / 2>(fold<kGroup / 2>(sums, sums));
  }
}

static inline float total(const Floats& sums) { return folded<kWidth>(sums)[0]; }

// The totals of four vectors, each the same, bit for bit, as alone.
static inline void totals(const Floats* sums, float* out) {
  if constexpr (kWidth >= 4) {
    const Floats first = fold<kWidth / 2>(sums[0], sums[1]);
    const Floats second = fold<kWidth / 2>(sums[2], sums[3]);
    const Floats all = folded<kWidth / 4>(fold<kWidth / 4>(first, second));
    out[0] = all[0];
    out[1] = all[kWidth / 2];
    out[2] = all[kWidth / 4];
    out[3] = all[kWidth / 2 + kWidth / 4];
  } else {
    for (u32 i = 0; i < 4; ++i) out[i] = total(sums[i]);
  }
}

struct Singles {
  using Element = float;
  static constexpr u32 kStep = kWidth;
  using Inputs = Floats;

  static Inputs inputs(const float* from, const float*) { return load<Floats>(from); }
  static Floats weights(const float* from) { return load<Floats>(from); }
  static void add(Floats& sums, const Floats& weights, const Inputs& x) { sums += weights * x; }
  static void lay_apart(const float*, u64, float*) {}
};

#if defined(KVRAG_PAIRS)

// The processor multiplies pairs of bfloat16 and adds up in float.
struct Halves {
  using Element = u16;
  static constexpr u32 kStep = 2 * kWidth;
  using Inputs = Ints;

  static Inputs inputs(const u16* from, const float*) { return load<Ints>(from); }
  static Ints weights(const u16* from) { return load<Ints>(from); }
  static void add(Floats& sums, const Ints& weights, const Inputs& x) {
    sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(__m512i)weights, (__m512bh)(__m512i)x);
  }
  static void lay_apart(const u16*, u64, float*) {}
};

#else

// A register holds pairs of bfloat16; shifted or masked, each half of them is floats. Inputs lie
// apart to match: in each step, first those of low halves.
struct Halves {
  using Element = u16;
  static constexpr u32 kStep = 2 * kWidth;
  struct Inputs {
    Floats low, high;
  };

  static Inputs inputs(const u16*, const float* apart) {
    return {load<Floats>(apart), load<Floats>(apart + kWidth)};
  }
  static Ints weights(const u16* from) { return load<Ints>(from); }
  static void add(Floats& sums, const Ints& weights, const Inputs& x) {
    const Ints low = weights << 16;
    const Ints high = weights & ~0xffff;
    Floats factors;
    std::memcpy(&factors, &low, sizeof factors);
    sums += factors * x.low;
    std::memcpy(&factors, &high, sizeof factors);
    sums += factors * x.high;
  }
  static void lay_apart(const u16* from, u64 count, float* apart) {
    for (u64 at = 0; at + kStep <= count; at += kStep) {
      for (u32 i = 0; i < kStep; ++i) apart[at + i % 2 * kWidth + i / 2] = value_of(from[at + i]);
    }
  }
};

#endif

// Outputs `output` to `output + count` of `kNumRows` rows from `row` on; count is at most kOutputs.
template <u32 kNumRows, class Way>
static inline void some(const Linear& layer, const float* apart, u64 row, u64 output, u64 count) {
  using Element = typename Way::Element;
  const u64 width = layer.num_inputs;
  const Element* weights[kOutputs];
  for (u32 i = 0; i < kOutputs; ++i) {
    // What is over repeats the last, and is not stored.
    const u64 which = output + (i < count ? i : count - 1);
    weights[i] = static_cast<const Element*>(layer.weight) + which * width;
  }
  const Element* inputs[kNumRows];
  const float* laid[kNumRows];
  for (u32 r = 0; r < kNumRows; ++r) {
    inputs[r] = static_cast<const Element*>(layer.input) + (row + r) * width;
    laid[r] = apart + (row + r) * width;
  }
  // Memory is read in its own order, ahead of the outputs that are taken by turns.
  const Element* next = weights[0] + kOutputs * width;
  Floats sums[kOutputs][kNumRows] = {};
  u64 at = 0;
  for (; at + Way::kStep <= width; at += Way::kStep, next += kOutputs * Way::kStep) {
    typename Way::Inputs x[kNumRows];
#pragma GCC unroll 8
    for (u32 r = 0; r < kNumRows; ++r) x[r] = Way::inputs(inputs[r] + at, laid[r] + at);
#pragma GCC unroll 4
    for (u32 i = 0; i < kOutputs; ++i) {
      __builtin_prefetch(next + i * Way::kStep, 0, 2);
      const auto w = Way::weights(weights[i] + at);
#pragma GCC unroll 8
      for (u32 r = 0; r < kNumRows; ++r) Way::add(sums[i][r], w, x[r]);
    }
  }
  Element* const out = static_cast<Element*>(layer.out);
  const Element* const bias = static_cast<const Element*>(layer.bias);
  static_assert(kOutputs == 4);
  float added[kNumRows][kOutputs];
  // With each place in `sums` known, GCC keeps it in registers, not in memory, throughout the loop
  // above.
#pragma GCC unroll 8
  for (u32 r = 0; r < kNumRows; ++r) {
    const Floats of_row[kOutputs] = {sums[0][r], sums[1][r], sums[2][r], sums[3][r]};
    totals(of_row, added[r]);
  }
  for (u64 i = 0; i < count; ++i) {
    for (u32 r = 0; r < kNumRows; ++r) {
      float sum = added[r][i];
      for (u64 rest = at; rest < width; ++rest) {
        sum += value_of(weights[i][rest]) * value_of(inputs[r][rest]);
      }
      if (bias != nullptr) sum += value_of(bias[output + i]);
      put(out + (row + r) * layer.num_outputs + output + i, sum);
    }
  }
}

// The same for the rows that are left, fewer than kMost + 1.
template <u32 kMost, class Way>
static inline void last(const Linear& layer, const float* apart, u64 row, u64 output, u64 count) {
  if (layer.num_rows - row == kMost) {
    some<kMost, Way>(layer, apart, row, output, count);
  } else if constexpr (kMost > 1) {
    last<kMost - 1, Way>(layer, apart, row, output, count);
  }
}

template <class Way>
static inline void outputs(const Linear& layer, float* apart, u64 begin, u64 end) {
  using Element = typename Way::Element;
  const u64 width = layer.num_inputs;
  for (u64 row = 0; row < layer.num_rows; ++row) {
    Way::lay_apart(static_cast<const Element*>(layer.input) + row * width, width,
                   apart + row * width);
  }
  for (u64 output = begin; output < end; output += kOutputs) {
    const u64 count = end - output < kOutputs ? end - output : kOutputs;
    u64 row = 0;
    for (; row + kRows < layer.num_rows; row += kRows) {
      some<kRows, Way>(layer, apart, row, output, count);
    }
    last<kRows, Way>(layer, apart, row, output, count);
  }
}

}  // namespace linear

[[maybe_unused]] void linear_tile(const Linear& layer, u64 begin, u64 end,
                                  float* scratch) noexcept {
  if (layer.type == ElementType::f32) {
    linear::outputs<linear::Singles>(layer, scratch, begin, end);
  } else {
    linear::outputs<linear::Halves>(layer, scratch, begin, end);
  }
}

}  // namespace
}  // namespace kvrag::host

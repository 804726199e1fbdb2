// A linear layer in 8 bits: rows are quantised here, weights were before; sums are whole numbers.
//
// Weights are stored plus 128, without a sign, as the processors' instructions for 8 bits want one
// of the two factors. What that adds, 128 times the sum of a row, is where a row's sums begin.
#pragma once

#include "kernels.h"
#include "kvrag/reconstruct.h"
#include "vectors.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvrag::host {
namespace {  // also for members: the linker must never use another instruction set's
namespace int8 {

constexpr u32 kWidth = KVRAG_FLOATS;
typedef i32 Ints __attribute__((vector_size(4 * KVRAG_FLOATS)));

// One vector of outputs times four inputs of a row: `add` sums the products up. `Weights` and
// `Inputs` are as the instructions want them; the former are shared by rows, the latter by outputs.
#if defined(__AVX512VNNI__)

constexpr u32 kRows = 6;
constexpr u32 kVectors = 4;
struct Products {
  using Weights = __m512i;
  using Inputs = __m512i;

  static inline Weights weights_of(const u8* from) { return _mm512_loadu_si512(from); }
  static inline Weights weights_in(const Ints& four) { return (__m512i)four; }
  static inline Inputs inputs_of(const i8* from) { return _mm512_set1_epi32(load<i32>(from)); }
  static inline void add(Ints& sums, const Weights& weights, const Inputs& inputs) {
    sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, weights, inputs);
  }
};

#elif defined(__AVX2__)

// Pairs of 16 bits: those of even and of odd places.
constexpr u32 kRows = kWidth == 16 ? 4 : 2;
constexpr u32 kVectors = kWidth == 16 ? 4 : 2;
struct Products {
  struct Weights {
    Ints even, odd;
  };
  using Inputs = Weights;

  static inline Weights weights_of(const u8* from) { return weights_in(load<Ints>(from)); }
  static inline Weights weights_in(const Ints& four) {
    return {four & 0xff00ff, (four >> 8) & 0xff00ff};
  }
  static inline Inputs inputs_of(const i8* from) {
    const auto pair = [](i32 low, i32 high) {
      return static_cast<i32>((low & 0xffff) | u32(high) << 16);
    };
    return {Ints{} + pair(from[0], from[2]), Ints{} + pair(from[1], from[3])};
  }
  static inline void add(Ints& sums, const Weights& weights, const Inputs& inputs) {
#if KVRAG_FLOATS == 16
    sums += (Ints)_mm512_madd_epi16((__m512i)weights.even, (__m512i)inputs.even);
    sums += (Ints)_mm512_madd_epi16((__m512i)weights.odd, (__m512i)inputs.odd);
#else
    sums += (Ints)_mm256_madd_epi16((__m256i)weights.even, (__m256i)inputs.even);
    sums += (Ints)_mm256_madd_epi16((__m256i)weights.odd, (__m256i)inputs.odd);
#endif
  }
};

#else

constexpr u32 kRows = 2;
constexpr u32 kVectors = 2;
struct Products {
  struct Weights {
    Ints at[4];
  };
  struct Inputs {
    i32 at[4];
  };

  static inline Weights weights_of(const u8* from) {
    Ints four;  // byte by byte, for any order of bytes
    Weights found;
    for (u32 i = 0; i < 4; ++i) {
      for (u32 lane = 0; lane < kWidth; ++lane) four[lane] = from[4 * lane + i];
      found.at[i] = four;
    }
    return found;
  }
  static inline Weights weights_in(const Ints& four) {
    u8 bytes[sizeof four];
    std::memcpy(bytes, &four, sizeof four);
    return weights_of(bytes);
  }
  static inline Inputs inputs_of(const i8* from) { return {{from[0], from[1], from[2], from[3]}}; }
  static inline void add(Ints& sums, const Weights& weights, const Inputs& inputs) {
    for (u32 i = 0; i < 4; ++i) sums += weights.at[i] * inputs.at[i];
  }
};

#endif

static_assert(kInt8Panel % (kVectors * kWidth) == 0, "a panel is whole vectors");

static inline float value_of(float value) { return value; }

static inline float value_of(u16 bfloat16) { return reconstruct::from_bf16(bfloat16); }

static inline void put(float* to, float value) { *to = value; }
static inline void put(u16* to, float value) { *to = reconstruct::to_bf16(value); }

// The greatest magnitude as bits: their order is that of magnitudes, with NaN above all.
static inline u32 most(const float* from, u64 count) {
  u32 found = 0;
  for (u64 i = 0; i < count; ++i) {
    u32 bits;
    std::memcpy(&bits, from + i, sizeof bits);
    bits &= 0x7fffffff;
    found = bits > found ? bits : found;
  }
  return found;
}

static inline u32 most(const u16* from, u64 count) {
  u16 found = 0;
  for (u64 i = 0; i < count; ++i) {
    const u16 bits = from[i] & 0x7fff;
    found = bits > found ? bits : found;
  }
  return u32{found} << 16;
}

template <class Element>
static inline void quantise(const Int8Linear& layer, const Int8Rows& rows, u64 row) {
  constexpr u32 kInfinity = 0x7f800000;
  constexpr float kSmallest = 1e-30f;  // its inverse, times 127, is finite
  const u64 width = layer.num_inputs;
  const u64 stride = int8_stride(width);
  const Element* const from = static_cast<const Element*>(layer.input) + row * width;
  i8* const to = rows.values + row * stride;
  const u32 bits = most(from, width);
  float peak;
  std::memcpy(&peak, &bits, sizeof peak);
  const bool is_finite = bits < kInfinity;
  const float factor = is_finite && peak > kSmallest ? 127.0f / peak : 0.0f;
  i32 sum = 0;
  if (factor == 0.0f) {
    std::memset(to, 0, stride);
  } else {
    for (u64 i = 0; i < width; ++i) {
      // Adding 1.5 * 2^23 rounds to a whole number, which is then in the low bits.
      const float shifted = value_of(from[i]) * factor + 12582912.0f;
      i32 whole;
      std::memcpy(&whole, &shifted, sizeof whole);
      whole -= 0x4b400000;
      to[i] = static_cast<i8>(whole);
      sum += whole;
    }
    std::memset(to + width, 0, stride - width);
  }
  // A row that is not finite gives nothing else: its products are 0 times NaN.
  rows.scales[row] = !is_finite ? __builtin_nanf("") : factor == 0.0f ? 0.0f : peak / 127.0f;
  rows.starts[row] = -128 * sum;
}

// The outputs of one panel for `kNumRows` rows from `row` on.
template <u32 kNumRows, class Element>
static inline void some(const Int8Linear& layer, const Int8Rows& rows, u64 row, u64 panel) {
  const u64 stride = int8_stride(layer.num_inputs);
  const u8* const weights = layer.weight + panel * stride * kInt8Panel;
  const i8* const inputs = rows.values + row * stride;
  alignas(64) i32 found[kNumRows][kInt8Panel];
  for (u64 first = 0; first < kInt8Panel; first += kVectors * kWidth) {
    Ints sums[kNumRows][kVectors];
    for (u32 r = 0; r < kNumRows; ++r) {
      for (u32 v = 0; v < kVectors; ++v) sums[r][v] = Ints{} + rows.starts[row + r];
    }
    const u8* next = weights + 4 * first;
    for (u64 at = 0; at < stride; at += 4, next += 4 * kInt8Panel) {
      Products::Weights w[kVectors];
#pragma GCC unroll 4
      for (u32 v = 0; v < kVectors; ++v) w[v] = Products::weights_of(next + 4 * v * kWidth);
#pragma GCC unroll 8
      for (u32 r = 0; r < kNumRows; ++r) {
        const Products::Inputs x = Products::inputs_of(inputs + r * stride + at);
#pragma GCC unroll 4
        for (u32 v = 0; v < kVectors; ++v) Products::add(sums[r][v], w[v], x);
      }
    }
    for (u32 r = 0; r < kNumRows; ++r) {
      for (u32 v = 0; v < kVectors; ++v) store(found[r] + first + v * kWidth, sums[r][v]);
    }
  }
  const u64 output = panel * kInt8Panel;
  const u64 left = layer.num_outputs - output;
  const u64 count = left < kInt8Panel ? left : kInt8Panel;
  for (u32 r = 0; r < kNumRows; ++r) {
    Element* const out = static_cast<Element*>(layer.out) + (row + r) * layer.num_outputs + output;
    const float scale = rows.scales[row + r];
    for (u64 i = 0; i < count; ++i) {
      const float value = static_cast<float>(found[r][i]) * (scale * layer.scale[output + i]);
      put(out + i, value + layer.bias[output + i]);
    }
  }
}

// The same for the rows that are left, fewer than kMost + 1.
template <u32 kMost, class Element>
static inline void last(const Int8Linear& layer, const Int8Rows& rows, u64 row, u64 end,
                        u64 panel) {
  if (end - row == kMost) {
    some<kMost, Element>(layer, rows, row, panel);
  } else if constexpr (kMost > 1) {
    last<kMost - 1, Element>(layer, rows, row, end, panel);
  }
}

template <class Element>
static inline void multiply(const Int8Linear& layer, const Int8Rows& rows, u64 begin, u64 end,
                            u64 panel) {
  u64 row = begin;
  for (; row + kRows < end; row += kRows) some<kRows, Element>(layer, rows, row, panel);
  last<kRows, Element>(layer, rows, row, end, panel);
}

}  // namespace int8

void int8_quantise(const Int8Linear& layer, const Int8Rows& rows, u64 begin, u64 end) noexcept {
  for (u64 row = begin; row < end; ++row) {
    if (layer.type == ElementType::f32) {
      int8::quantise<float>(layer, rows, row);
    } else {
      int8::quantise<u16>(layer, rows, row);
    }
  }
}

void int8_multiply(const Int8Linear& layer, const Int8Rows& rows, u64 begin, u64 end,
                   u64 panel) noexcept {
  if (layer.type == ElementType::f32) {
    int8::multiply<float>(layer, rows, begin, end, panel);
  } else {
    int8::multiply<u16>(layer, rows, begin, end, panel);
  }
}

}  // namespace
}  // namespace kvrag::host

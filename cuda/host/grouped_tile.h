// A linear layer whose weights have 4 to 8 bits, with a scale for each group of inputs, as in GGUF
// files. Rows are quantised here, by groups too.
//
// The weights of one group, for one panel of outputs, are unpacked to bytes that the instructions
// for 8 bits take, once for all rows of a task: 2 KB, which stay in the nearest cache.
#pragma once

#include "int8_tile.h"

namespace kvrag::host {
namespace {  // also for members: the linker must never use another instruction set's
namespace grouped {

using int8::Ints;
using int8::kWidth;
typedef float Floats __attribute__((vector_size(4 * KVRAG_FLOATS)));
typedef u16 Halves __attribute__((vector_size(2 * KVRAG_FLOATS)));

constexpr u32 kQuads = kGroup / 4;
constexpr u32 kVectors = kInt8Panel / kWidth;  // of 32 bits, for all outputs of a panel

// Half precision, exactly: its exponent is 112 less than that of float32.
static inline Floats halves(const u16* from) {
  const Ints bits = __builtin_convertvector(load<Halves>(from), Ints);
  return ((Floats)((bits & 0x7fff) << 13) * 0x1p112f) *
         (1.0f - __builtin_convertvector((bits >> 14) & 2, Floats));
}

// Two quads of weights, of one vector of outputs.
struct Pair {
  Ints even, odd;
};

// What is packed: see `GroupedLinear`. `quad` is even.
template <u32 kBits>
static inline Pair pair_of(const u8* vector, u32 quad) {
  const auto plane = [&](u32 number) { return load<Ints>(vector + 4 * number * kInt8Panel); };
  if constexpr (kBits == 8) return {plane(quad), plane(quad + 1)};
  const Ints both = plane(quad / 2);
  Pair found{both & 0x0f0f0f0f, (both >> 4) & 0x0f0f0f0f};
  if constexpr (kBits == 5) {
    const Ints high = plane(4) >> static_cast<i32>(quad);
    found.even |= (high & 0x01010101) << 4, found.odd |= ((high >> 1) & 0x01010101) << 4;
  } else if constexpr (kBits == 6) {
    const Ints high = plane(4 + quad / 4) >> static_cast<i32>(2 * (quad % 4));
    found.even |= (high & 0x03030303) << 4, found.odd |= ((high >> 2) & 0x03030303) << 4;
  }
  return found;
}

template <u32 kBits>
static inline void unpack(const u8* from, u8* to) {
  for (u32 v = 0; v < kVectors; ++v) {
    for (u32 quad = 0; quad < kQuads; quad += 2) {
      const Pair pair = pair_of<kBits>(from + 4 * v * kWidth, quad);
      store(to + 4 * (quad * kInt8Panel + v * kWidth), pair.even);
      store(to + 4 * ((quad + 1) * kInt8Panel + v * kWidth), pair.odd);
    }
  }
}

typedef i32 Four __attribute__((vector_size(16)));
typedef u32 Words __attribute__((vector_size(4 * KVRAG_FLOATS)));
typedef i8 Bytes __attribute__((vector_size(KVRAG_FLOATS)));

static inline Floats wide(const float* from) { return load<Floats>(from); }
static inline Floats wide(const u16* bfloat16) {
  return (Floats)(__builtin_convertvector(load<Halves>(bfloat16), Ints) << 16);
}

// Four lanes of what `fold` makes of all.
template <class Fold>
static inline Four four_of(const Ints& all, const Fold& fold) {
  Four parts[kWidth / 4];
  std::memcpy(parts, &all, sizeof parts);
  for (u32 i = 1; i < kWidth / 4; ++i) parts[0] = fold(parts[0], parts[i]);
  return parts[0];
}

// Quantise one group; return its scale.
template <class Element>
static inline float quantise_group(const Element* from, i8* to, i32* sums) {
  constexpr float kSmallest = 1e-30f;  // its inverse, times 127, is finite
  constexpr u32 kParts = kGroup / kWidth;
  Floats values[kParts];
  Ints most{};
  for (u32 i = 0; i < kParts; ++i) {
    values[i] = wide(from + i * kWidth);
    // Magnitudes as bits: their order is that of magnitudes, with NaN above all.
    const Ints bits = (Ints)values[i] & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  const auto greater = [](const Four& a, const Four& b) { return a > b ? a : b; };
  const Four found = four_of(most, greater);
  const i32 two[2] = {found[0] > found[1] ? found[0] : found[1],
                      found[2] > found[3] ? found[2] : found[3]};
  const i32 bits = two[0] > two[1] ? two[0] : two[1];
  float peak;
  std::memcpy(&peak, &bits, sizeof peak);
  const bool is_finite = bits < 0x7f800000;
  sums[0] = sums[1] = 0;
  if (!is_finite || peak <= kSmallest) {
    std::memset(to, 0, kGroup);
    // A row that is not finite gives nothing else: its products are 0 times NaN.
    return is_finite ? 0.0f : __builtin_nanf("");
  }
  const float factor = 127.0f / peak;
  Ints totals[2] = {};
  for (u32 i = 0; i < kParts; ++i) {
    // Adding 1.5 * 2^23 rounds to a whole number, which is then in the low bits.
    const Ints whole = (Ints)(values[i] * factor + 12582912.0f) - 0x4b400000;
    store(to + i * kWidth, __builtin_convertvector(whole, Bytes));
    totals[2 * i / kParts] += whole;
  }
  for (u32 half = 0; half < 2; ++half) {
    const Four sum = four_of(totals[half], [](const Four& a, const Four& b) { return a + b; });
    sums[half] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  return peak / 127.0f;
}

template <class Element>
static inline void quantise(const GroupedLinear& layer, const GroupedRows& rows, u64 row) {
  const u64 width = layer.num_inputs, groups = grouped_groups(width);
  const Element* const from = static_cast<const Element*>(layer.input) + row * width;
  for (u64 group = 0; group < groups; ++group) {
    const u64 first = group * kGroup, left = width - first, at = row * groups + group;
    const Element* inputs = from + first;
    Element padded[kGroup] = {};
    if (left < kGroup) {
      std::memcpy(padded, inputs, left * sizeof(Element));
      inputs = padded;
    }
    rows.scales[at] = quantise_group(inputs, rows.values + at * kGroup, rows.sums + 2 * at);
  }
}

// As in int8_tile.h. Numbers below 128 also fit the instruction that adds pairs of products up in
// 16 bits.
#if defined(__AVX512VNNI__)
constexpr u32 kRowsAtOnce = 3;
template <bool>
using Products = int8::Products;
#elif defined(__AVX2__)
constexpr u32 kRowsAtOnce = 2;
template <bool kFits>
struct Products : int8::Products {};
#if KVRAG_FLOATS == 16
#define KVRAG_MM(name) _mm512_##name
typedef __m512i Register;
#else
#define KVRAG_MM(name) _mm256_##name
typedef __m256i Register;
#endif
template <>
struct Products<true> {
  using Weights = Ints;
  using Inputs = Ints;
  static inline Weights weights_of(const u8* from) { return load<Ints>(from); }
  static inline Weights weights_in(const Ints& four) { return four; }
  static inline Inputs inputs_of(const i8* from) { return Ints{} + load<i32>(from); }
  static inline void add(Ints& sums, const Weights& weights, const Inputs& inputs) {
    const Register pairs = KVRAG_MM(maddubs_epi16)((Register)weights, (Register)inputs);
    sums += (Ints)KVRAG_MM(madd_epi16)(pairs, KVRAG_MM(set1_epi16)(1));
  }
};
#else
constexpr u32 kRowsAtOnce = 2;
template <bool>
using Products = int8::Products;
#endif

// Groups whose weights are unpacked at a time: 16 KB, half of a nearest cache.
constexpr u64 kGroupsAtOnce = 8;

// How a layer's numbers are stored: their bits, quads that share a scale, and what 0 stands for in
// scales (minus; 0 itself: a layer's `least`).
template <u32 bits, u32 scaled, i32 offset>
struct Kind {
  static constexpr u32 kBits = bits;
  static constexpr u32 kParts = kQuads / scaled;
  static constexpr i32 kOffset = offset;
};

// Weights of some groups, unpacked.
template <class Kind>
struct Unpacked {
  alignas(64) u8 weights[kGroupsAtOnce][kGroup * kInt8Panel];
  alignas(64) float scales[kGroupsAtOnce][Kind::kParts][kInt8Panel];
  alignas(64) float least[kGroupsAtOnce][kInt8Panel];
};

// Add products of `count` groups to the outputs of a panel, for `kNumRows` rows.
template <class Kind, u32 kNumRows>
static inline void some(const Unpacked<Kind>& from, const GroupedRows& rows, u64 first_group,
                        u64 groups, u64 count, u32 first, float* out) {
  using P = Products<(Kind::kBits < 8)>;
  constexpr u32 kAtOnce = int8::kVectors, kScaled = kQuads / Kind::kParts;
  Floats found[kNumRows][kAtOnce];
  for (u32 r = 0; r < kNumRows; ++r) {
    for (u32 v = 0; v < kAtOnce; ++v)
      found[r][v] = load<Floats>(out + r * kInt8Panel + (first + v) * kWidth);
  }
  for (u64 i = 0; i < count; ++i) {
    const u64 group = first_group + i;
    const i8* const inputs = rows.values + group * kGroup;
    const u8* const weights = from.weights[i] + 4 * first * kWidth;
    for (u32 part = 0; part < Kind::kParts; ++part) {
      Ints sums[kNumRows][kAtOnce];
#pragma GCC unroll 4
      for (u32 r = 0; r < kNumRows; ++r) {
        i32 start = 0;
        if constexpr (Kind::kOffset != 0) {
          const i32* const summed = rows.sums + 2 * (r * groups + group);
          start = -Kind::kOffset * (Kind::kParts == 1 ? summed[0] + summed[1] : summed[part]);
        }
#pragma GCC unroll 4
        for (u32 v = 0; v < kAtOnce; ++v) sums[r][v] = Ints{} + start;
      }
#pragma GCC unroll 8
      for (u32 quad = part * kScaled; quad < (part + 1) * kScaled; ++quad) {
        typename P::Weights w[kAtOnce];
#pragma GCC unroll 4
        for (u32 v = 0; v < kAtOnce; ++v)
          w[v] = P::weights_of(weights + 4 * (quad * kInt8Panel + v * kWidth));
#pragma GCC unroll 4
        for (u32 r = 0; r < kNumRows; ++r) {
          const typename P::Inputs x = P::inputs_of(inputs + r * groups * kGroup + 4 * quad);
#pragma GCC unroll 4
          for (u32 v = 0; v < kAtOnce; ++v) P::add(sums[r][v], w[v], x);
        }
      }
#pragma GCC unroll 4
      for (u32 r = 0; r < kNumRows; ++r) {
        const float scale = rows.scales[r * groups + group];
#pragma GCC unroll 4
        for (u32 v = 0; v < kAtOnce; ++v) {
          found[r][v] += __builtin_convertvector(sums[r][v], Floats) *
                         (scale * load<Floats>(from.scales[i][part] + (first + v) * kWidth));
        }
      }
    }
    if constexpr (Kind::kOffset == 0) {
#pragma GCC unroll 4
      for (u32 r = 0; r < kNumRows; ++r) {
        const i32* const summed = rows.sums + 2 * (r * groups + group);
        const float total =
            rows.scales[r * groups + group] * static_cast<float>(summed[0] + summed[1]);
#pragma GCC unroll 4
        for (u32 v = 0; v < kAtOnce; ++v)
          found[r][v] += total * load<Floats>(from.least[i] + (first + v) * kWidth);
      }
    }
  }
  for (u32 r = 0; r < kNumRows; ++r) {
    for (u32 v = 0; v < kAtOnce; ++v)
      store(out + r * kInt8Panel + (first + v) * kWidth, found[r][v]);
  }
}

// Bytes ahead of those that are read: about what memory delivers while it answers.
constexpr u64 kAhead = 4096;

// Outputs of a panel, for few rows: weights go from memory to registers. Sums are those of `some`.
template <class Kind, u32 kNumRows>
static inline void few(const GroupedLinear& layer, const GroupedRows& rows, u64 row, u64 panel,
                       float* out) {
  using P = Products<(Kind::kBits < 8)>;
  constexpr u32 kAtOnce = int8::kVectors, kScaled = kQuads / Kind::kParts;
  constexpr u32 kScales = Kind::kParts * kInt8Panel, kBytes = grouped_bytes(Kind::kBits);
  const u64 groups = grouped_groups(layer.num_inputs);
  for (u32 first = 0; first < kVectors; first += kAtOnce) {
    const u8* weight = layer.weight + panel * groups * kBytes;
    const u16* scale = layer.scale + panel * groups * kScales + first * kWidth;
    const u16* least = layer.least + panel * groups * kInt8Panel + first * kWidth;
    Floats found[kNumRows][kAtOnce] = {};
    for (u64 i = row * groups; i < (row + 1) * groups; ++i) {
      if (first == 0) {
        for (u32 at = 0; at < kBytes; at += 64) __builtin_prefetch(weight + kAhead + at);
      }
      const i8* const inputs = rows.values + i * kGroup;
      for (u32 part = 0; part < Kind::kParts; ++part) {
        Ints sums[kNumRows][kAtOnce];
#pragma GCC unroll 4
        for (u32 r = 0; r < kNumRows; ++r) {
          i32 start = 0;
          if constexpr (Kind::kOffset != 0) {
            const i32* const summed = rows.sums + 2 * (r * groups + i);
            start = -Kind::kOffset * (Kind::kParts == 1 ? summed[0] + summed[1] : summed[part]);
          }
#pragma GCC unroll 4
          for (u32 v = 0; v < kAtOnce; ++v) sums[r][v] = Ints{} + start;
        }
#pragma GCC unroll 4
        for (u32 quad = part * kScaled; quad < (part + 1) * kScaled; quad += 2) {
#pragma GCC unroll 4
          for (u32 v = 0; v < kAtOnce; ++v) {
            const Pair pair = pair_of<Kind::kBits>(weight + 4 * (first + v) * kWidth, quad);
            const typename P::Weights even = P::weights_in(pair.even),
                                      odd = P::weights_in(pair.odd);
#pragma GCC unroll 4
            for (u32 r = 0; r < kNumRows; ++r) {
              const i8* const x = inputs + r * groups * kGroup + 4 * quad;
              P::add(sums[r][v], even, P::inputs_of(x));
              P::add(sums[r][v], odd, P::inputs_of(x + 4));
            }
          }
        }
#pragma GCC unroll 4
        for (u32 r = 0; r < kNumRows; ++r) {
#pragma GCC unroll 4
          for (u32 v = 0; v < kAtOnce; ++v) {
            found[r][v] +=
                __builtin_convertvector(sums[r][v], Floats) *
                (rows.scales[r * groups + i] * halves(scale + part * kInt8Panel + v * kWidth));
          }
        }
      }
      if constexpr (Kind::kOffset == 0) {
#pragma GCC unroll 4
        for (u32 r = 0; r < kNumRows; ++r) {
          const i32* const summed = rows.sums + 2 * (r * groups + i);
          const float total =
              rows.scales[r * groups + i] * static_cast<float>(summed[0] + summed[1]);
#pragma GCC unroll 4
          for (u32 v = 0; v < kAtOnce; ++v) found[r][v] += total * halves(least + v * kWidth);
        }
        least += kInt8Panel;
      }
      weight += kBytes, scale += kScales;
    }
    for (u32 r = 0; r < kNumRows; ++r) {
      for (u32 v = 0; v < kAtOnce; ++v)
        store(out + r * kInt8Panel + (first + v) * kWidth, found[r][v]);
    }
  }
}

// Outputs of a panel, for at most kGroupedRows rows.
template <class Kind>
static inline void sum_up(const GroupedLinear& layer, const GroupedRows& rows, u64 begin, u64 end,
                          u64 panel, float* out) {
  constexpr u32 kScales = Kind::kParts * kInt8Panel;
  const u64 groups = grouped_groups(layer.num_inputs);
  const u8* weight = layer.weight + panel * groups * grouped_bytes(Kind::kBits);
  const u16* scale = layer.scale + panel * groups * kScales;
  const u16* least = layer.least + panel * groups * kInt8Panel;
  if (end - begin == 1) return few<Kind, 1>(layer, rows, begin, panel, out);
  if (end - begin == 2) return few<Kind, 2>(layer, rows, begin, panel, out);
  std::memset(out, 0, (end - begin) * kInt8Panel * sizeof(float));
  Unpacked<Kind> unpacked;
  for (u64 group = 0; group < groups; group += kGroupsAtOnce) {
    const u64 count = groups - group < kGroupsAtOnce ? groups - group : kGroupsAtOnce;
    for (u64 i = 0; i < count; ++i, weight += grouped_bytes(Kind::kBits), scale += kScales) {
      unpack<Kind::kBits>(weight, unpacked.weights[i]);
      for (u32 j = 0; j < kScales; j += kWidth) store(unpacked.scales[i][0] + j, halves(scale + j));
      if constexpr (Kind::kOffset == 0) {
        for (u32 j = 0; j < kInt8Panel; j += kWidth)
          store(unpacked.least[i] + j, halves(least + j));
        least += kInt8Panel;
      }
    }
    for (u32 first = 0; first < kVectors; first += int8::kVectors) {
      u64 row = begin;
      const auto run = [&](auto add, u64 step) {
        const GroupedRows from{rows.values + row * groups * kGroup, rows.scales + row * groups,
                               rows.sums + 2 * row * groups};
        add(unpacked, from, group, groups, count, first, out + (row - begin) * kInt8Panel);
        row += step;
      };
      while (row + kRowsAtOnce <= end) run(some<Kind, kRowsAtOnce>, kRowsAtOnce);
      while (row < end) run(some<Kind, 1>, 1);
    }
  }
}

static inline void narrow(const Floats& value, float* to) { store(to, value); }
static inline void narrow(const Floats& value, u16* to) {
  // As `reconstruct::to_bf16`.
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  const Words found = (bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded;
  store(to, __builtin_convertvector(found, Halves));
}

template <class Element>
static inline void put(const GroupedLinear& layer, u64 begin, u64 end, u64 panel,
                       const float* sums) {
  const u64 output = panel * kInt8Panel, left = layer.num_outputs - output;
  const u64 count = left < kInt8Panel ? left : kInt8Panel, whole = count / kWidth * kWidth;
  const float* const bias = layer.bias + output;
  for (u64 row = begin; row < end; ++row, sums += kInt8Panel) {
    Element* const out = static_cast<Element*>(layer.out) + row * layer.num_outputs + output;
    for (u64 i = 0; i < whole; i += kWidth)
      narrow(load<Floats>(sums + i) * layer.factor + load<Floats>(bias + i), out + i);
    for (u64 i = whole; i < count; ++i) int8::put(out + i, sums[i] * layer.factor + bias[i]);
  }
}

}  // namespace grouped

void grouped_quantise(const GroupedLinear& layer, const GroupedRows& rows, u64 begin,
                      u64 end) noexcept {
  for (u64 row = begin; row < end; ++row) {
    if (layer.type == ElementType::f32) {
      grouped::quantise<float>(layer, rows, row);
    } else {
      grouped::quantise<u16>(layer, rows, row);
    }
  }
}

void grouped_multiply(const GroupedLinear& layer, const GroupedRows& rows, u64 begin, u64 end,
                      u64 panel) noexcept {
  alignas(64) float sums[kGroupedRows * kInt8Panel];
  const bool is_even = layer.least == nullptr;
  using namespace grouped;
  const auto run = layer.bits == 4   ? is_even ? sum_up<Kind<4, 8, 8>> : sum_up<Kind<4, 8, 0>>
                   : layer.bits == 5 ? is_even ? sum_up<Kind<5, 8, 16>> : sum_up<Kind<5, 8, 0>>
                   : layer.bits == 6 ? sum_up<Kind<6, 4, 32>>
                                     : sum_up<Kind<8, 8, 128>>;
  run(layer, rows, begin, end, panel, sums);
  if (layer.type == ElementType::f32) {
    grouped::put<float>(layer, begin, end, panel, sums);
  } else {
    grouped::put<u16>(layer, begin, end, panel, sums);
  }
}

}  // namespace
}  // namespace kvrag::host

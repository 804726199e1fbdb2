// Rows of numbers in few bits each, of fixed width, to keys and values and back.
//
// A band of channels is a basis in 8 bits times the levels that numbers of 0 to 6 bits stand for,
// times a token's scale, plus a mean. Sums are whole numbers, the same with all instruction sets;
// the rest is float32.
#pragma once

#include "placing.h"
#include "vectors.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvrag::host {
namespace {  // also for members: the linker must never use another instruction set's
namespace packed {

constexpr u32 kWidth = KVRAG_FLOATS;
typedef i32 Ints __attribute__((vector_size(4 * KVRAG_FLOATS)));
using Floats = typename VectorOf<kWidth>::Type;

// One vector of channels times four levels of a token: `add` sums the products up. Levels are
// below 128, so that pairs of products fit 16 bits. Quads have their first byte lowest.
#if defined(__AVX512VNNI__)

using Weights = Ints;
using Inputs = Ints;

static inline Weights weights_of(const i8* from) { return load<Ints>(from); }
static inline Inputs inputs_of(const i8* from) { return Ints{} + load<i32>(from); }
static inline void add(Ints& sums, const Weights& weights, const Inputs& inputs) {
  sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)inputs, (__m512i)weights);
}

#elif defined(__AVX2__)

using Weights = Ints;
using Inputs = Ints;

static inline Weights weights_of(const i8* from) { return load<Ints>(from); }
static inline Inputs inputs_of(const i8* from) { return Ints{} + load<i32>(from); }
static inline void add(Ints& sums, const Weights& weights, const Inputs& inputs) {
#if KVRAG_FLOATS == 16
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)inputs, (__m512i)weights);
  sums += (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)inputs, (__m256i)weights);
  sums += (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

#elif defined(__SSE2__)

struct Weights {
  __m128i even, odd;
};
using Inputs = Weights;

static inline Weights weights_of(const i8* from) {
  const __m128i four = load<__m128i>(from);
  return {_mm_srai_epi16(_mm_slli_epi16(four, 8), 8), _mm_srai_epi16(four, 8)};
}
static inline Inputs inputs_of(const i8* from) {
  const __m128i four = _mm_set1_epi32(load<i32>(from));
  return {_mm_and_si128(four, _mm_set1_epi16(255)), _mm_srli_epi16(four, 8)};
}
static inline void add(Ints& sums, const Weights& weights, const Inputs& inputs) {
  sums += (Ints)_mm_madd_epi16(weights.even, inputs.even);
  sums += (Ints)_mm_madd_epi16(weights.odd, inputs.odd);
}

#else

struct Weights {
  Ints at[4];
};
struct Inputs {
  i32 at[4];
};

static inline Weights weights_of(const i8* from) {
  const Ints four = load<Ints>(from);
  return {{four << 24 >> 24, four << 16 >> 24, four << 8 >> 24, four >> 24}};
}
static inline Inputs inputs_of(const i8* from) { return {{from[0], from[1], from[2], from[3]}}; }
static inline void add(Ints& sums, const Weights& weights, const Inputs& inputs) {
  for (u32 i = 0; i < 4; ++i) sums += weights.at[i] * inputs.at[i];
}

#endif

// Tokens and vectors of channels whose sums fit the registers.
constexpr u32 kRows = kWidth == 16 ? 8 : 2;
constexpr u32 kVectors = kWidth == 8 ? 4 : 2;
// Tokens that are decoded together: their numbers, their channels and a basis fit the first cache.
constexpr u32 kTokens = 16;
static_assert(kTokens % kRows == 0 && kPackedPanel % (kVectors * kWidth) == 0, "whole vectors");

// The levels of one token's band. Eight bytes are read for any width: what follows a row, or the
// last of them, is there.
static inline void unpack_band(const u8* from, const u8* widths, u64 count, const u8* levels,
                               i8* to) {
#if defined(__AVX512VBMI__)
  for (u64 i = 0; i < count; i += kPackedGroup) {
    const u64 width = widths[i / kPackedGroup], each = 0x0101010101010101;
    const u64 most = ((u64{1} << width) - 1) * each;
    store(to + i, _pdep_u64(load<u64>(from), most) + most + each);
    from += width;
  }
  const __m512i low = load<__m512i>(levels), high = load<__m512i>(levels + 64);
  for (u64 i = 0; i < count; i += 64) {
    const u64 rest = count - i;
    const __mmask64 some = rest < 64 ? (u64{1} << rest) - 1 : ~u64{0};
    const __m512i places = _mm512_maskz_loadu_epi8(some, to + i);
    _mm512_mask_storeu_epi8(to + i, some, _mm512_permutex2var_epi8(low, places, high));
  }
#else
  for (u64 i = 0; i < count; i += kPackedGroup) {
    const u64 width = widths[i / kPackedGroup], most = (u64{1} << width) - 1;
    const u8* const own = levels + most + 1;
    const u64 word = load<u64>(from);
    u64 found = 0;
    for (u64 k = 0; k < kPackedGroup; ++k) found |= u64{own[word >> (k * width) & most]} << (8 * k);
    store(to + i, found);
    from += width;
  }
#endif
}

// Channels of one panel for kRows tokens.
static inline void multiply(const i8* numbers, u64 count, const i8* basis, const i32* starts,
                            const float* mean, const float* factors, float* out, u64 stride) {
  for (u64 first = 0; first < kPackedPanel; first += kVectors * kWidth) {
    Ints sums[kRows][kVectors];
    for (u32 r = 0; r < kRows; ++r) {
      for (u32 v = 0; v < kVectors; ++v) sums[r][v] = Ints{};
    }
    const i8* next = basis + 4 * first;
    for (u64 at = 0; at < count; at += 4, next += 4 * kPackedPanel) {
      Weights w[kVectors];
#pragma GCC unroll 4
      for (u32 v = 0; v < kVectors; ++v) w[v] = weights_of(next + 4 * v * kWidth);
#pragma GCC unroll 8
      for (u32 r = 0; r < kRows; ++r) {
        const Inputs x = inputs_of(numbers + r * count + at);
#pragma GCC unroll 4
        for (u32 v = 0; v < kVectors; ++v) add(sums[r][v], w[v], x);
      }
    }
#pragma GCC unroll 8
    for (u32 r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (u32 v = 0; v < kVectors; ++v) {
        const u64 at = first + v * kWidth;
        const Ints whole = sums[r][v] * 2 + load<Ints>(starts + at);
        const Floats values = __builtin_convertvector(whole, Floats) * factors[r];
        store(out + r * stride + at, values + load<Floats>(mean + at));
      }
    }
  }
}

typedef u16 Halves __attribute__((vector_size(2 * KVRAG_FLOATS)));
typedef u32 Words __attribute__((vector_size(4 * KVRAG_FLOATS)));

// To the nearest, to even ones from halfway; NaN to a quiet one.
static inline void put(u16* to, const Floats& values) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh((__m512)values));
#else
  Words bits;
  std::memcpy(&bits, &values, sizeof bits);
  const Words nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words kept = values == values ? nearest : 0x7fc0 - Words{};
  store(to, __builtin_convertvector(kept, Halves));
#endif
}

// `place_row` for bfloat16 and whole vectors.
static inline void place_vectors(const float* row, u64 head, u64 token,
                                 const Placement& placement) {
  const i64 at = static_cast<i64>(token);
  u16* const out = static_cast<u16*>(placement.out) +
                   static_cast<i64>(head) * placement.head_stride + at * placement.token_stride;
  const u64 half = placement.num_rotated / 2;
  const float* const cos = placement.cos + at * placement.cos_stride;
  const float* const sin = placement.sin + at * placement.sin_stride;
  for (u64 i = 0; i < half; i += kWidth) {
    const Floats first = load<Floats>(row + i), second = load<Floats>(row + half + i);
    const Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
    put(out + i, first * c - second * s);
    put(out + half + i, second * c + first * s);
  }
  for (u64 i = 2 * half; i < placement.head_dim; i += kWidth) put(out + i, load<Floats>(row + i));
}

}  // namespace packed

void packed_tile(const Packed& packed, const Placement& placement, u64 begin, u64 end,
                 float* scratch) noexcept {
  const u64 count = packed.num_numbers, channels = packed.band_channels;
  const u64 panels = packed_panels(channels);
  const u64 stride = packed_stride(packed);
  float* const rows = scratch;
  i8* const numbers = reinterpret_cast<i8*>(rows + packed::kTokens * stride);
  float factors[packed::kTokens] = {};
  const u64 head_dim = placement.head_dim;
  const bool in_vectors = placement.type == ElementType::bf16 && head_dim % packed::kWidth == 0 &&
                          placement.num_rotated % (2 * packed::kWidth) == 0;
  const u8* first = packed.rows + (placement.first_token + begin) * packed.row_bytes;
  for (; begin < end; begin += packed::kTokens, first += packed::kTokens * packed.row_bytes) {
    const u64 num_tokens = end - begin < packed::kTokens ? end - begin : packed::kTokens;
    const u64 padded = (num_tokens + packed::kRows - 1) / packed::kRows * packed::kRows;
    std::memset(numbers + num_tokens * count, 0, (padded - num_tokens) * count);
    for (u64 band = 0; band < packed.num_bands; ++band) {
      const u8* const widths = packed.widths + band * (count / kPackedGroup);
      for (u64 token = 0; token < num_tokens; ++token) {
        const u8* const from = first + token * packed.row_bytes + band * packed.band_bytes;
        factors[token] = packed.scales[band] * packed.powers[*from];
        packed::unpack_band(from + 1, widths, count, packed.levels, numbers + token * count);
      }
      for (u64 panel = 0; panel < panels; ++panel) {
        const u64 at = (band * panels + panel) * kPackedPanel;
        for (u64 token = 0; token < padded; token += packed::kRows) {
          packed::multiply(numbers + token * count, count, packed.basis + at * count,
                           packed.starts + at, packed.mean + at, factors + token,
                           rows + token * stride + band * channels + panel * kPackedPanel, stride);
        }
      }
    }
    for (u64 token = 0; token < num_tokens; ++token) {
      for (u64 head = 0; head < placement.num_heads; ++head) {
        float* const row = rows + token * stride + head * head_dim;
        if (in_vectors) {
          packed::place_vectors(row, head, begin + token, placement);
        } else {
          place_row(row, head, begin + token, placement);
        }
      }
    }
  }
}

// Scalar code has no registers for eight floats, and so cannot return them.
static inline void read_eight(const float* from, Floats8& eight) {
  std::memcpy(&eight, from, sizeof eight);
}

// Eight numbers of one group: the nearest that can be stored, and what they stand for.
static inline void to_packed(const Packing& packing, u64 width, const Floats8& numbers,
                             float inverse, u8 (&nearest)[kPackedGroup], Floats8& found) {
  constexpr float kMiddle = kPackedMiddle;
  Floats8 place = numbers * inverse + kMiddle;
  place = place > 0.0f ? place : Floats8{};
  place = place < 2 * kMiddle ? place : Floats8{} + 2 * kMiddle;
  const Ints8 whole = __builtin_convertvector(place, Ints8);
  const u8* const all = packing.nearest + 256 * width;
  const u8* const own = packing.levels + (u64{1} << width);
  for (u32 i = 0; i < kPackedGroup; ++i) {
    nearest[i] = all[whole[i]];
    found[i] = own[nearest[i]];
  }
  found = width == 0 ? Floats8{} : 2.0f * found - kMiddle;
}

static inline float sum_of(const Floats8& eight) {
  float sum = 0.0f;
  for (u32 i = 0; i < 8; ++i) sum += eight[i];
  return sum;
}

// Scales are powers of two by eighths; those below the one that fits all numbers are tried too.
void pack_tile(const Packing& packing, u64 begin, u64 end) noexcept {
  constexpr i32 kTries = 12;
  const u64 groups = packing.num_numbers / kPackedGroup;
  const auto most_of = [&](u64 group) {
    const u8 level = packing.levels[(u64{2} << packing.widths[group]) - 1];
    return static_cast<float>(2 * level - kPackedMiddle);
  };
  for (u64 row = begin; row < end; ++row) {
    const float* const numbers = packing.numbers + row * packing.num_numbers;
    Floats8 x, found;
    float peak = 0.0f;
    for (u64 group = 0; group < groups; ++group) {
      if (packing.widths[group] == 0) continue;
      read_eight(numbers + kPackedGroup * group, x);
      const Floats8 size = x < 0.0f ? -x : x;
      float greatest = 0.0f;
      for (u32 i = 0; i < 8; ++i) greatest = size[i] > greatest ? size[i] : greatest;
      const float needed = greatest / most_of(group);
      peak = needed > peak ? needed : peak;
    }
    i32 first = 255;
    while (first > 0 && packing.powers[first - 1] >= peak) --first;
    float best = 3.0e38f;
    i32 chosen = first;
    u8 nearest[kPackedGroup];
    for (i32 power = first; power >= 0 && power > first - kTries; --power) {
      const float scale = packing.powers[power], inverse = 1.0f / scale;
      Floats8 losses{};
      for (u64 group = 0; group < groups; ++group) {
        read_eight(numbers + kPackedGroup * group, x);
        to_packed(packing, packing.widths[group], x, inverse, nearest, found);
        const Floats8 difference = x - found * scale;
        losses += difference * difference * packing.weights[group];
      }
      const float lost = sum_of(losses);
      if (lost < best) {
        best = lost;
        chosen = power;
      }
    }
    packing.lost[row] = best;
    u8* to = packing.rows + row * packing.row_bytes;
    *to++ = static_cast<u8>(chosen);
    const float inverse = 1.0f / packing.powers[chosen];
    for (u64 group = 0; group < groups; ++group) {
      const u64 width = packing.widths[group];
      read_eight(numbers + kPackedGroup * group, x);
      to_packed(packing, width, x, inverse, nearest, found);
      u64 word = 0;
      for (u64 i = 0; i < kPackedGroup; ++i) word |= u64{nearest[i]} << (i * width);
      std::memcpy(to, &word, width);
      to += width;
    }
  }
}

}  // namespace
}  // namespace kvrag::host

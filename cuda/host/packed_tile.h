// Rows of numbers in few bits each, of fixed width, to keys and values and back.
//
// A band of channels is a basis in 8 bits times the levels that numbers of 0 to 6 bits stand for,
// times a token's scale, plus a mean. Sums are whole numbers, the same with all instruction sets;
// the rest is float32.
#pragma once

#include <algorithm>

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
// below 128, so that pairs of products fit 16 bits where these are added first. Quads have their
// first byte lowest.
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

// The levels of some tokens of a band, doubled where products still fit. Except in whole registers,
// eight bytes are read for any width: what follows a row, or the last of them, is there.
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

constexpr bool kDoubled = true;

static inline void unpack(const u8* rows, u64 row_bytes, u64 num_tokens, const u8* widths,
                          u64 count, const u8* levels, i8* to) {
  constexpr u64 kEach = 0x0101010101010101, kSteps = 0x0706050403020100;
  __m512i low = load<__m512i>(levels), high = load<__m512i>(levels + 64);
  low = _mm512_add_epi8(low, low);
  high = _mm512_add_epi8(high, high);
  for (u64 first = 0; first < count; first += 64) {
    const u64 rest = count - first < 64 ? count - first : 64;
    // Of each group: its eight bytes, where its numbers begin in them, and the level of number 0.
    u64 places[8] = {}, shifts[8] = {}, zeros[8] = {}, num_bytes = 0;
    for (u64 group = 0; group < rest / kPackedGroup; ++group) {
      const u64 width = widths[first / kPackedGroup + group];
      places[group] = num_bytes * kEach + kSteps;
      shifts[group] = width * kSteps;
      zeros[group] = kEach << width;
      num_bytes += width;
    }
    const __m512i place = load<__m512i>(places), shift = load<__m512i>(shifts);
    const __m512i zero = load<__m512i>(zeros), most = _mm512_sub_epi8(zero, _mm512_set1_epi8(1));
    const __mmask64 read = (u64{1} << num_bytes) - 1, written = ~u64{0} >> (64 - rest);
    const u8* from = rows;
    for (u64 token = 0; token < num_tokens; ++token, from += row_bytes) {
      const __m512i groups = _mm512_permutexvar_epi8(place, _mm512_maskz_loadu_epi8(read, from));
      const __m512i numbers = _mm512_and_si512(_mm512_multishift_epi64_epi8(shift, groups), most);
      const __m512i found = _mm512_permutex2var_epi8(low, _mm512_or_si512(numbers, zero), high);
      _mm512_mask_storeu_epi8(to + token * count + first, written, found);
    }
    rows += num_bytes;
  }
}

#else

constexpr bool kDoubled = false;

static inline void unpack(const u8* rows, u64 row_bytes, u64 num_tokens, const u8* widths,
                          u64 count, const u8* levels, i8* to) {
  for (u64 token = 0; token < num_tokens; ++token, rows += row_bytes, to += count) {
    const u8* from = rows;
    for (u64 i = 0; i < count; i += kPackedGroup) {
      const u64 width = widths[i / kPackedGroup], most = (u64{1} << width) - 1;
      const u8* const own = levels + most + 1;
      const u64 word = load<u64>(from);
      u64 found = 0;
      for (u64 k = 0; k < kPackedGroup; ++k) {
        found |= u64{own[word >> (k * width) & most]} << (8 * k);
      }
      store(to + i, found);
      from += width;
    }
  }
}

#endif

// Channels of one panel for kRows tokens.
static inline void multiply(const i8* numbers, u64 count, const i8* basis, const i32* starts,
                            const float* mean, const float* factors, float* out, u64 stride) {
  for (u64 first = 0; first < kPackedPanel; first += kVectors * kWidth) {
    Ints sums[kRows][kVectors];
    for (u32 r = 0; r < kRows; ++r) {
      for (u32 v = 0; v < kVectors; ++v) {
        sums[r][v] = kDoubled ? load<Ints>(starts + first + v * kWidth) : Ints{};
      }
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
        const Ints whole = kDoubled ? sums[r][v] : sums[r][v] * 2 + load<Ints>(starts + at);
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
      const u8* const from = first + band * packed.band_bytes;
      for (u64 token = 0; token < num_tokens; ++token) {
        factors[token] = packed.scales[band] * packed.powers[from[token * packed.row_bytes]];
      }
      packed::unpack(from + 1, packed.row_bytes, num_tokens, widths, count, packed.levels, numbers);
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

// Scales are powers of two by eighths; those below the one that fits all numbers are tried too.
constexpr i32 kTries = 12;

// Scalar code has no registers for eight floats, and so cannot return them.
static inline void read_eight(const float* from, Floats8& eight) {
  std::memcpy(&eight, from, sizeof eight);
}

// Where eight numbers are in tables of 256, each from -127 to 127 times the scale.
static inline void find_places(const Floats8& numbers, float inverse, Ints8& places) {
  constexpr float kMiddle = kPackedMiddle;
  Floats8 place = numbers * inverse + kMiddle;
  place = place > 0.0f ? place : Floats8{};
  place = place < 2 * kMiddle ? place : Floats8{} + 2 * kMiddle;
  places = __builtin_convertvector(place, Ints8);
}

#if defined(__AVX512VBMI__)

// The same table in bytes, which fit four registers.
struct Meanings {
  alignas(64) i8 of[(kPackedBits + 1) * 256];

  explicit Meanings(const Packing& packing) {
    for (u64 i = 0; i < sizeof of; ++i) of[i] = static_cast<i8>(packing.meanings[i]);
  }
};

// A register holds eight numbers by two scales.
static inline __m512i places_of(__m512 numbers, __m512 inverse) {
  const __m512 middle = _mm512_set1_ps(kPackedMiddle);
  const __m512 place =
      _mm512_max_ps(_mm512_add_ps(_mm512_mul_ps(numbers, inverse), middle), _mm512_setzero_ps());
  return _mm512_cvttps_epi32(_mm512_min_ps(place, _mm512_set1_ps(2 * kPackedMiddle)));
}

// What a row loses by each of the scales.
static inline void lose(const Packing& packing, const Meanings& meanings, const float* numbers,
                        const float (&scales)[kTries], float (&lost)[kTries]) {
  constexpr u32 kRegisters = kTries / 2, kFull = 4;
  static_assert(kTries == 12, "a whole register of bytes, and half of one");
  __m512 scale[kRegisters], inverse[kRegisters], losses[kRegisters];
  for (u32 r = 0; r < kRegisters; ++r) {
    scale[r] =
        _mm512_insertf32x8(_mm512_set1_ps(scales[2 * r]), _mm256_set1_ps(scales[2 * r + 1]), 1);
    inverse[r] = _mm512_div_ps(_mm512_set1_ps(1.0f), scale[r]);
    losses[r] = _mm512_setzero_ps();
  }
  const auto top_of = [](u32 first) {  // four bytes of each quarter, above three zeros each
    const i32 at = static_cast<i32>(first << 24 | 0x808080);
    return _mm512_broadcast_i32x4(
        _mm_setr_epi32(at, at + (1 << 24), at + (2 << 24), at + (3 << 24)));
  };
  const __m512i tops[kFull] = {top_of(0), top_of(4), top_of(8), top_of(12)};
  for (u64 group = 0; group < packing.num_numbers / kPackedGroup; ++group) {
    const __m512 x = _mm512_broadcast_f32x8(_mm256_loadu_ps(numbers + kPackedGroup * group));
    const __m512 weight = _mm512_set1_ps(packing.weights[group]);
    const i8* const own = meanings.of + 256 * packing.widths[group];
    const __m512i table[4] = {load<__m512i>(own), load<__m512i>(own + 64), load<__m512i>(own + 128),
                              load<__m512i>(own + 192)};
    __m512i places[kRegisters];
#pragma GCC unroll 6
    for (u32 r = 0; r < kRegisters; ++r) places[r] = places_of(x, inverse[r]);
    const __m512i last = _mm512_packus_epi32(places[4], places[5]);
    const __m512i bytes[2] = {_mm512_packus_epi16(_mm512_packus_epi32(places[0], places[1]),
                                                  _mm512_packus_epi32(places[2], places[3])),
                              _mm512_packus_epi16(last, last)};
    __m512i found[2];
#pragma GCC unroll 2
    for (u32 half = 0; half < 2; ++half) {
      const __m512i low = _mm512_permutex2var_epi8(table[0], bytes[half], table[1]);
      const __m512i high = _mm512_permutex2var_epi8(table[2], bytes[half], table[3]);
      found[half] = _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes[half]), low, high);
    }
#pragma GCC unroll 6
    for (u32 r = 0; r < kRegisters; ++r) {
      const __m512i odd =
          _mm512_srai_epi32(_mm512_shuffle_epi8(found[r / kFull], tops[r % kFull]), 24);
      const __m512 off = _mm512_sub_ps(x, _mm512_mul_ps(_mm512_cvtepi32_ps(odd), scale[r]));
      losses[r] = _mm512_add_ps(losses[r], _mm512_mul_ps(_mm512_mul_ps(off, off), weight));
    }
  }
  for (u32 r = 0; r < kRegisters; ++r) {
    const auto sums = (VectorOf<16>::Type)losses[r];
    for (u32 half = 0; half < 2; ++half) {
      float sum = 0.0f;
      for (u32 i = 0; i < 8; ++i) sum += sums[8 * half + i];
      lost[2 * r + half] = sum;
    }
  }
}

#else

struct Meanings {
  explicit Meanings(const Packing&) {}
};

static inline void lose(const Packing& packing, const Meanings&, const float* numbers,
                        const float (&scales)[kTries], float (&lost)[kTries]) {
  for (i32 one = 0; one < kTries; ++one) {
    const float scale = scales[one], inverse = 1.0f / scale;
    Floats8 losses{}, x, found;
    Ints8 places;
    for (u64 group = 0; group < packing.num_numbers / kPackedGroup; ++group) {
      const float* const own = packing.meanings + 256 * packing.widths[group];
      read_eight(numbers + kPackedGroup * group, x);
      find_places(x, inverse, places);
#if defined(__AVX2__)
      found = (Floats8)_mm256_i32gather_ps(own, (__m256i)places, 4);
#else
      for (u32 i = 0; i < kPackedGroup; ++i) found[i] = own[places[i]];
#endif
      const Floats8 difference = x - found * scale;
      losses += difference * difference * packing.weights[group];
    }
    float sum = 0.0f;
    for (u32 i = 0; i < kPackedGroup; ++i) sum += losses[i];
    lost[one] = sum;
  }
}

#endif

void pack_tile(const Packing& packing, u64 begin, u64 end) noexcept {
  const u64 groups = packing.num_numbers / kPackedGroup;
  const Meanings meanings(packing);
  for (u64 row = begin; row < end; ++row) {
    const float* const numbers = packing.numbers + row * packing.num_numbers;
    Floats8 x, peaks{};
    for (u64 group = 0; group < groups; ++group) {
      if (packing.widths[group] == 0) continue;
      read_eight(numbers + kPackedGroup * group, x);
      const Floats8 needed =
          (x < 0.0f ? -x : x) / packing.meanings[256 * packing.widths[group] + 255];
      peaks = needed > peaks ? needed : peaks;
    }
    float peak = 0.0f;
    for (u32 i = 0; i < kPackedGroup; ++i) peak = peaks[i] > peak ? peaks[i] : peak;
    const u64 first = static_cast<u64>(
        std::lower_bound(packing.powers, packing.powers + 255, peak) - packing.powers);
    float scales[kTries], lost[kTries];
    for (u64 less = 0; less < kTries; ++less) {
      scales[less] = packing.powers[first < less ? 0 : first - less];
    }
    lose(packing, meanings, numbers, scales, lost);
    const u64 chosen = static_cast<u64>(std::min_element(lost, lost + kTries) - lost);
    packing.lost[row] = lost[chosen];
    u8* to = packing.rows + row * packing.row_bytes;
    *to++ = static_cast<u8>(first < chosen ? 0 : first - chosen);
    const float inverse = 1.0f / scales[chosen];
    Ints8 places;
    for (u64 group = 0; group < groups; ++group) {
      const u64 width = packing.widths[group];
      const u8* const nearest = packing.nearest + 256 * width;
      read_eight(numbers + kPackedGroup * group, x);
      find_places(x, inverse, places);
      u64 word = 0;
      for (u64 i = 0; i < kPackedGroup; ++i) word |= u64{nearest[places[i]]} << (i * width);
      std::memcpy(to, &word, width);
      to += width;
    }
  }
}

}  // namespace
}  // namespace kvrag::host

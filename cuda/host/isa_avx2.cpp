// AVX2 and FMA: four registers of 8 lanes.
#define KVRAG_FLOATS 8  // in a register
#define KVRAG_TOKENS 4  // whose sums fit the registers, two vectors each
#define KVRAG_SUMS 6    // lines of attention whose sums fit the registers
#define KVRAG_UNROLL _Pragma("GCC unroll 4")

#include <immintrin.h>

#include "attend_tile.h"
#include "elements_tile.h"
#include "grouped_tile.h"
#include "lane_tables.h"
#include "linear_tile.h"
#include "packed_tile.h"
#include "planes.h"
#include "rans_streams.h"
#include "transform_tile.h"

namespace kvrag::host {
namespace {

constexpr auto kLaneTables = make_lane_tables<8>();

struct Avx2 {
  using Register = __m256i;
  static constexpr u32 kWidth = 8;

  static Register load(const u32* states) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states));
  }
  static void store(u32* states, Register x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(states), x);
  }

  static Register zero() { return _mm256_setzero_si256(); }
  static Register offsets(const u8* contexts, u32 bits) {
    const __m128i loaded = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(contexts));
    return _mm256_slli_epi32(_mm256_cvtepu8_epi32(loaded), static_cast<i32>(bits));
  }

  static void pop(Register& x, const u32* table, Register offsets, const u8*& next, u8* out) {
    const __m256i entry = entries(x, table, offsets);
    store_symbols(out, entry);
    const __m256i state = popped(x, entry);
    refill(x, state, below_bound(state), next);
  }

  static void pop_first(Register& x, u32 count, const u32* table, Register offsets, const u8*& next,
                        u8* out) {
    const __m256i entry = entries(x, table, offsets);
    store_symbols(out, entry);
    const __m256i active = first(count);
    const __m256i state = _mm256_blendv_epi8(x, popped(x, entry), active);
    refill(x, state, _mm256_and_si256(below_bound(state), active), next);
  }

  static bool push(Register& x, const u32* table, Register offsets, u8*& next, const u8* in) {
    return push_masked(x, _mm256_set1_epi32(-1), table, offsets, next, in);
  }

  static bool push_first(Register& x, u32 count, const u32* table, Register offsets, u8*& next,
                         const u8* in) {
    return push_masked(x, first(count), table, offsets, next, in);
  }

 private:
  static __m256i first(u32 count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<i32>(count)), lanes);
  }

  static u32 bits(__m256i mask) {
    return static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
  }

  static __m256i order(const u8* indices) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(indices)));
  }

  static __m256i entries(__m256i x, const u32* table, __m256i offsets) {
    const __m256i slots = _mm256_and_si256(x, _mm256_set1_epi32(rans::kNumSlots - 1));
    return _mm256_i32gather_epi32(reinterpret_cast<const i32*>(table),
                                  _mm256_add_epi32(slots, offsets), 4);
  }

  static void store_symbols(u8* out, __m256i entry) {
    const __m256i low = _mm256_and_si256(entry, _mm256_set1_epi32(0xff));
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
  }

  static __m256i popped(__m256i x, __m256i entry) {
    const __m256i less_one =
        _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(rans::kNumSlots - 1));
    const __m256i frequency = _mm256_add_epi32(less_one, _mm256_set1_epi32(1));
    const __m256i high = _mm256_srli_epi32(x, rans::kProbabilityBits);
    return _mm256_add_epi32(_mm256_mullo_epi32(frequency, high), _mm256_srli_epi32(entry, 20));
  }

  static __m256i below_bound(__m256i state) {
    return _mm256_cmpeq_epi32(_mm256_srli_epi32(state, rans::kWordBits), _mm256_setzero_si256());
  }

  static void refill(Register& x, __m256i state, __m256i lanes, const u8*& next) {
    const u32 mask = bits(lanes);
    const __m256i ahead =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
    const __m256i words = _mm256_permutevar8x32_epi32(ahead, order(kLaneTables.expand[mask]));
    const __m256i refilled = _mm256_or_si256(_mm256_slli_epi32(state, rans::kWordBits), words);
    x = _mm256_blendv_epi8(state, refilled, lanes);
    next += 2 * __builtin_popcount(mask);
  }

  // In two steps, since the signed conversion cannot handle values of 2^31 and more.
  static __m256 to_float(__m256i value) {
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(value, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(value, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
  }

  static bool push_masked(Register& x, __m256i active, const u32* table, Register offsets,
                          u8*& next, const u8* in) {
    const __m256i symbols =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
    const __m256i entry = _mm256_i32gather_epi32(reinterpret_cast<const i32*>(table),
                                                 _mm256_add_epi32(symbols, offsets), 4);
    const __m256i frequency = _mm256_and_si256(entry, _mm256_set1_epi32(0xffff));
    const __m256i impossible =
        _mm256_and_si256(active, _mm256_cmpeq_epi32(frequency, _mm256_setzero_si256()));

    const __m256i top = _mm256_srli_epi32(x, 32 - rans::kProbabilityBits);
    const __m256i emit = _mm256_andnot_si256(_mm256_cmpgt_epi32(frequency, top), active);
    const u32 mask = bits(emit);
    // The words go to the upper end of a register, so that one plain store puts them right
    // below the previous words. What it writes below them is overwritten later.
    const __m256i packed =
        _mm256_and_si256(_mm256_permutevar8x32_epi32(x, order(kLaneTables.pack_high[mask])),
                         _mm256_set1_epi32(0xffff));
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(next - 16),
        _mm_packus_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
    next -= 2 * __builtin_popcount(mask);
    const __m256i state = _mm256_blendv_epi8(x, _mm256_srli_epi32(x, rans::kWordBits), emit);

    // The quotient is below 2^20, so its estimate in float is off by at most one. The
    // remainder shows in which direction.
    __m256i quotient =
        _mm256_cvttps_epi32(_mm256_div_ps(to_float(state), _mm256_cvtepi32_ps(frequency)));
    __m256i remainder = _mm256_sub_epi32(state, _mm256_mullo_epi32(quotient, frequency));
    const __m256i over = _mm256_srai_epi32(remainder, 31);
    quotient = _mm256_add_epi32(quotient, over);
    remainder = _mm256_add_epi32(remainder, _mm256_and_si256(over, frequency));
    const __m256i exact = _mm256_cmpgt_epi32(frequency, remainder);
    const __m256i under = _mm256_xor_si256(exact, _mm256_set1_epi32(-1));
    quotient = _mm256_sub_epi32(quotient, under);
    remainder = _mm256_sub_epi32(remainder, _mm256_and_si256(under, frequency));

    const __m256i base = _mm256_add_epi32(remainder, _mm256_srli_epi32(entry, 16));
    const __m256i pushed =
        _mm256_add_epi32(_mm256_slli_epi32(quotient, rans::kProbabilityBits), base);
    x = _mm256_blendv_epi8(x, pushed, active);
    return bits(impossible) == 0;
  }
};

}  // namespace

const Kernels kAvx2 = {
    "avx2",
    decode_streams<Avx2>,
    1,
    encode_stream<Avx2>,
    transform_tile,
    packed_tile,
    pack_tile,
    magnitude_contexts,
    refine_values,
    attend_tile,
    attention::kLanes,
    linear_tile,
    int8_quantise,
    int8_multiply,
    grouped_quantise,
    grouped_multiply,
    norm_tile,
    gate_tile,
    rotate_tile,
};

}  // namespace kvrag::host

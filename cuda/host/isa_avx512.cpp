// AVX-512 (F, BW, DQ, VL): two registers of 16 lanes.
#define KVRAG_FLOATS 16  // in a register
#define KVRAG_TOKENS 8   // whose sums fit the registers, two vectors each
#define KVRAG_SUMS 8     // lines of attention whose sums fit the registers
#define KVRAG_UNROLL _Pragma("GCC unroll 2")

#include <immintrin.h>

#include "attend_tile.h"
#include "elements_tile.h"
#include "grouped_tile.h"
#include "linear_tile.h"
#include "packed_tile.h"
#include "planes.h"
#include "rans_streams.h"
#include "transform_tile.h"

namespace kvrag::host {
namespace {

struct Avx512 {
  using Register = __m512i;
  static constexpr u32 kWidth = 16;

  static Register load(const u32* states) { return _mm512_loadu_si512(states); }
  static void store(u32* states, Register x) { _mm512_storeu_si512(states, x); }
  static Register zero() { return _mm512_setzero_si512(); }
  static Register offsets(const u8* contexts, u32 bits) {
    const __m128i loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(contexts));
    return _mm512_slli_epi32(_mm512_cvtepu8_epi32(loaded), bits);
  }

  static __mmask16 first(u32 count) {
    return static_cast<__mmask16>(count >= kWidth ? 0xffff : (1u << count) - 1);
  }

  static void pop(Register& x, const u32* table, Register offsets, const u8*& next, u8* out) {
    const __m512i entry = entries(x, table, offsets);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(entry));
    const __m512i state = popped(x, entry);
    refill(x, state, below_bound(state), next);
  }

  static void pop_first(Register& x, u32 count, const u32* table, Register offsets, const u8*& next,
                        u8* out) {
    const __m512i entry = entries(x, table, offsets);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(entry));
    const __mmask16 active = first(count);
    const __m512i state = _mm512_mask_mov_epi32(x, active, popped(x, entry));
    refill(x, state, below_bound(state) & active, next);
  }

  static bool push(Register& x, const u32* table, Register offsets, u8*& next, const u8* in) {
    return push_masked(x, 0xffff, table, offsets, next, in);
  }

  static bool push_first(Register& x, u32 count, const u32* table, Register offsets, u8*& next,
                         const u8* in) {
    return push_masked(x, first(count), table, offsets, next, in);
  }

 private:
  static __m512i entries(__m512i x, const u32* table, __m512i offsets) {
    const __m512i slots = _mm512_and_si512(x, _mm512_set1_epi32(rans::kNumSlots - 1));
    return _mm512_i32gather_epi32(_mm512_add_epi32(slots, offsets), table, 4);
  }

  static __m512i popped(__m512i x, __m512i entry) {
    const __m512i less_one =
        _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(rans::kNumSlots - 1));
    const __m512i frequency = _mm512_add_epi32(less_one, _mm512_set1_epi32(1));
    const __m512i high = _mm512_srli_epi32(x, rans::kProbabilityBits);
    return _mm512_add_epi32(_mm512_mullo_epi32(frequency, high), _mm512_srli_epi32(entry, 20));
  }

  static __mmask16 below_bound(__m512i state) {
    return _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(rans::kLowerBound));
  }

  static void refill(Register& x, __m512i state, __mmask16 lanes, const u8*& next) {
    const __m256i ahead = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(next));
    const __m512i words = _mm512_maskz_expand_epi32(lanes, _mm512_cvtepu16_epi32(ahead));
    x = _mm512_mask_or_epi32(state, lanes, _mm512_slli_epi32(state, rans::kWordBits), words);
    next += 2 * __builtin_popcount(lanes);
  }

  static bool push_masked(Register& x, __mmask16 active, const u32* table, Register offsets,
                          u8*& next, const u8* in) {
    const __m512i symbols =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
    const __m512i entry = _mm512_i32gather_epi32(_mm512_add_epi32(symbols, offsets), table, 4);
    const __m512i frequency = _mm512_and_si512(entry, _mm512_set1_epi32(0xffff));
    const __mmask16 impossible = _mm512_mask_testn_epi32_mask(active, frequency, frequency);

    const __mmask16 emit = _mm512_mask_cmpge_epu32_mask(
        active, _mm512_srli_epi32(x, 32 - rans::kProbabilityBits), frequency);
    // The words go to the upper end of a register, so that one plain store puts them right
    // below the previous words. What it writes below them is overwritten later.
    const u32 count = static_cast<u32>(__builtin_popcount(emit));
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i rotated = _mm512_permutexvar_epi32(
        _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<i32>(count))),
        _mm512_maskz_compress_epi32(emit, x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(next - 32), _mm512_cvtepi32_epi16(rotated));
    next -= 2 * count;
    const __m512i state = _mm512_mask_srli_epi32(x, emit, x, rans::kWordBits);

    // The quotient is below 2^20, so its estimate in float is off by at most one. The
    // remainder shows in which direction.
    const __m512i estimate = _mm512_cvttps_epi32(
        _mm512_div_ps(_mm512_cvtepu32_ps(state), _mm512_cvtepi32_ps(frequency)));
    __m512i remainder = _mm512_sub_epi32(state, _mm512_mullo_epi32(estimate, frequency));
    __m512i quotient = estimate;
    const __m512i one = _mm512_set1_epi32(1);
    const __mmask16 over = _mm512_movepi32_mask(remainder);
    quotient = _mm512_mask_sub_epi32(quotient, over, quotient, one);
    remainder = _mm512_mask_add_epi32(remainder, over, remainder, frequency);
    const __mmask16 under = _mm512_cmpge_epi32_mask(remainder, frequency);
    quotient = _mm512_mask_add_epi32(quotient, under, quotient, one);
    remainder = _mm512_mask_sub_epi32(remainder, under, remainder, frequency);

    const __m512i base = _mm512_add_epi32(remainder, _mm512_srli_epi32(entry, 16));
    const __m512i pushed =
        _mm512_add_epi32(_mm512_slli_epi32(quotient, rans::kProbabilityBits), base);
    x = _mm512_mask_mov_epi32(x, active, pushed);
    return impossible == 0;
  }
};

}  // namespace

const Kernels kAvx512 = {
    "avx512",
    decode_streams<Avx512>,
    1,
    encode_stream<Avx512>,
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

// NEON: eight registers of 4 lanes.
#define KVRAG_FLOATS 4  // in a register
#define KVRAG_TOKENS 8  // whose sums fit the registers, two vectors each
#define KVRAG_SUMS 6    // lines of attention whose sums fit the registers
#define KVRAG_UNROLL _Pragma("GCC unroll 8")

#include <arm_neon.h>

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

// Byte shuffles for the lanes' permutations. `expand` puts one of the next four words into the low
// half of a lane and zero into its high half; `pack_high` collects low halves.
struct Shuffles {
  alignas(16) u8 expand[16][16];
  alignas(8) u8 pack_high[16][8];
};

constexpr Shuffles make_shuffles() {
  constexpr auto lanes = make_lane_tables<4>();
  Shuffles shuffles{};
  for (u32 mask = 0; mask < 16; ++mask) {
    for (u32 lane = 0; lane < 4; ++lane) {
      shuffles.expand[mask][4 * lane] = static_cast<u8>(2 * lanes.expand[mask][lane]);
      shuffles.expand[mask][4 * lane + 1] = static_cast<u8>(2 * lanes.expand[mask][lane] + 1);
      shuffles.expand[mask][4 * lane + 2] = 255;
      shuffles.expand[mask][4 * lane + 3] = 255;
      shuffles.pack_high[mask][2 * lane] = static_cast<u8>(4 * lanes.pack_high[mask][lane]);
      shuffles.pack_high[mask][2 * lane + 1] = static_cast<u8>(4 * lanes.pack_high[mask][lane] + 1);
    }
  }
  return shuffles;
}

constexpr Shuffles kShuffles = make_shuffles();
alignas(16) constexpr u32 kBits[4] = {1, 2, 4, 8};
alignas(16) constexpr u32 kLanes[4] = {0, 1, 2, 3};

struct Neon {
  using Register = uint32x4_t;
  static constexpr u32 kWidth = 4;

  static Register load(const u32* states) { return vld1q_u32(states); }
  static void store(u32* states, Register x) { vst1q_u32(states, x); }

  static Register zero() { return vdupq_n_u32(0); }
  static Register offsets(const u8* contexts, u32 bits) {
    const u32 loaded[4] = {contexts[0], contexts[1], contexts[2], contexts[3]};
    return vshlq_u32(vld1q_u32(loaded), vdupq_n_s32(static_cast<i32>(bits)));
  }

  static void pop(Register& x, const u32* table, Register offsets, const u8*& next, u8* out) {
    pop_masked(x, vdupq_n_u32(~0u), table, offsets, next, out);
  }

  static void pop_first(Register& x, u32 count, const u32* table, Register offsets, const u8*& next,
                        u8* out) {
    pop_masked(x, first(count), table, offsets, next, out);
  }

  static bool push(Register& x, const u32* table, Register offsets, u8*& next, const u8* in) {
    return push_masked(x, vdupq_n_u32(~0u), table, offsets, next, in);
  }

  static bool push_first(Register& x, u32 count, const u32* table, Register offsets, u8*& next,
                         const u8* in) {
    return push_masked(x, first(count), table, offsets, next, in);
  }

 private:
  static uint32x4_t first(u32 count) { return vcltq_u32(vld1q_u32(kLanes), vdupq_n_u32(count)); }

  static u32 bits(uint32x4_t mask) { return vaddvq_u32(vandq_u32(mask, vld1q_u32(kBits))); }

  static uint32x4_t look_up(const u32* table, uint32x4_t index) {
    const u32 entries[4] = {table[vgetq_lane_u32(index, 0)], table[vgetq_lane_u32(index, 1)],
                            table[vgetq_lane_u32(index, 2)], table[vgetq_lane_u32(index, 3)]};
    return vld1q_u32(entries);
  }

  static void pop_masked(Register& x, uint32x4_t active, const u32* table, Register offsets,
                         const u8*& next, u8* out) {
    const uint32x4_t slot_mask = vdupq_n_u32(rans::kNumSlots - 1);
    const uint32x4_t entry = look_up(table, vaddq_u32(vandq_u32(x, slot_mask), offsets));
    const uint16x4_t narrow = vmovn_u32(entry);
    const uint8x8_t symbols = vmovn_u16(vcombine_u16(narrow, narrow));
    vst1_lane_u32(reinterpret_cast<u32*>(out), vreinterpret_u32_u8(symbols), 0);

    const uint32x4_t less_one = vandq_u32(vshrq_n_u32(entry, 8), slot_mask);
    const uint32x4_t frequency = vaddq_u32(less_one, vdupq_n_u32(1));
    const uint32x4_t high = vshrq_n_u32(x, rans::kProbabilityBits);
    const uint32x4_t popped = vmlaq_u32(vshrq_n_u32(entry, 20), frequency, high);
    const uint32x4_t state = vbslq_u32(active, popped, x);

    const uint32x4_t lanes = vandq_u32(vcltq_u32(state, vdupq_n_u32(rans::kLowerBound)), active);
    const u32 mask = bits(lanes);
    const uint8x16_t ahead = vcombine_u8(vld1_u8(next), vdup_n_u8(0));
    const uint32x4_t words =
        vreinterpretq_u32_u8(vqtbl1q_u8(ahead, vld1q_u8(kShuffles.expand[mask])));
    const uint32x4_t refilled = vorrq_u32(vshlq_n_u32(state, rans::kWordBits), words);
    x = vbslq_u32(lanes, refilled, state);
    next += 2 * __builtin_popcount(mask);
  }

  static bool push_masked(Register& x, uint32x4_t active, const u32* table, Register offsets,
                          u8*& next, const u8* in) {
    const u32 symbols[4] = {in[0], in[1], in[2], in[3]};
    const uint32x4_t entry = look_up(table, vaddq_u32(vld1q_u32(symbols), offsets));
    const uint32x4_t frequency = vandq_u32(entry, vdupq_n_u32(0xffff));
    const uint32x4_t impossible = vandq_u32(active, vceqzq_u32(frequency));

    const uint32x4_t top = vshrq_n_u32(x, 32 - rans::kProbabilityBits);
    const uint32x4_t emit = vandq_u32(vcgeq_u32(top, frequency), active);
    const u32 mask = bits(emit);
    // The words go to the upper end of a register, so that one plain store puts them right
    // below the previous words. What it writes below them is overwritten later.
    const uint8x8_t packed = vqtbl1_u8(vreinterpretq_u8_u32(x), vld1_u8(kShuffles.pack_high[mask]));
    vst1_u8(next - 8, packed);
    next -= 2 * __builtin_popcount(mask);
    const uint32x4_t state = vbslq_u32(emit, vshrq_n_u32(x, rans::kWordBits), x);

    // The quotient is below 2^20, so its estimate in float is off by at most one. The
    // remainder shows in which direction.
    uint32x4_t quotient = vcvtq_u32_f32(vdivq_f32(vcvtq_f32_u32(state), vcvtq_f32_u32(frequency)));
    uint32x4_t remainder = vmlsq_u32(state, quotient, frequency);
    const uint32x4_t over = vcltzq_s32(vreinterpretq_s32_u32(remainder));
    quotient = vaddq_u32(quotient, over);
    remainder = vaddq_u32(remainder, vandq_u32(over, frequency));
    const uint32x4_t under = vcgeq_u32(remainder, frequency);
    quotient = vsubq_u32(quotient, under);
    remainder = vsubq_u32(remainder, vandq_u32(under, frequency));

    const uint32x4_t base = vaddq_u32(remainder, vshrq_n_u32(entry, 16));
    const uint32x4_t pushed = vaddq_u32(vshlq_n_u32(quotient, rans::kProbabilityBits), base);
    x = vbslq_u32(active, pushed, x);
    return vmaxvq_u32(impossible) == 0;
  }
};

}  // namespace

const Kernels kNeon = {
    "neon",
    decode_streams<Neon>,
    1,
    encode_stream<Neon>,
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

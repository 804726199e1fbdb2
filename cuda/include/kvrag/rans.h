// The entropy coder, interleaved range asymmetric numeral systems (rANS): the arithmetic of one lane, the tables,
// and the layout of a payload. Source: Duda, arXiv 1311.2540; interleaving: Giesen, arXiv
// 1402.3392. The host's vector kernels (cuda/host) and the device's programs (cuda/triton) do
// exactly the same, 32 lanes at a time.
//
// A *model* is `num_classes` tables of frequencies over at most 256 symbols; each sums to 4096.
// A row of symbols has one class. If there are contexts, each symbol's context is added to it. A
// stream covers consecutive rows, in order. Token t of a row belongs to lane t % 32. If T is not a
// multiple of 32, the last vector of a row uses only its first (T % 32) lanes.
//
//     payload  u32 num_streams | u32 size_bytes[num_streams] | the streams
//     stream   u32 state[32]   | u16 words, in the order the decoder takes them
//
// All integers are little endian. Stream i of S covers the rows from floor(i R / S) on.
// Within a vector, the lanes that need a word take the next ones in ascending lane order. The
// encoder runs backwards from state 2^16 in every lane. The decoder must end in these states with
// no word left; otherwise the stream is damaged.
#pragma once

#include "kvrag/common.h"

namespace kvrag::rans {

constexpr u32 kNumLanes = 32;
constexpr u32 kProbabilityBits = 12;
constexpr u32 kNumSlots = 1u << kProbabilityBits;
constexpr u32 kMaxSymbols = 256;
constexpr u32 kLowerBound = 1u << 16;
constexpr u32 kWordBits = 16;
constexpr u32 kStateBytes = kNumLanes * sizeof(u32);

// What is wrong with a stream; the order is that of `_DAMAGE` in kvrag/native/entropy.py.
enum class Damage : i32 {
  none = 0,
  stream_count = 1,
  payload_size = 2,
  stream_size = 3,
  initial_state = 4,
  words_missing = 5,
  words_left = 6,
  final_state = 7,
};

// The row at which stream `stream` of `num_streams` begins; it ends where the next one begins.
KVRAG_HD static u64 first_row(u64 stream, u64 num_streams, u64 num_rows) {
  return stream * num_rows / num_streams;
}

// One slot of a decode table: symbol | (frequency - 1) << 8 | (slot - cumulative) << 20.
KVRAG_HD static u32 decode_entry(u32 symbol, u32 frequency, u32 offset) {
  return symbol | (frequency - 1) << 8 | offset << 20;
}

KVRAG_HD static u32 slot_of(u32 state) { return state & (kNumSlots - 1); }

KVRAG_HD static u8 symbol_of(u32 entry) { return static_cast<u8>(entry); }

// The state after the symbol of `entry` has been popped.
KVRAG_HD static u32 pop(u32 state, u32 entry) {
  return ((entry >> 8 & (kNumSlots - 1)) + 1) * (state >> kProbabilityBits) + (entry >> 20);
}

// Whether the decoder must refill; one word always suffices, since a popped state is never 0.
KVRAG_HD static bool needs_word(u32 state) { return state < kLowerBound; }

KVRAG_HD static u32 with_word(u32 state, u32 word) { return state << kWordBits | word; }

// One symbol of an encode table: frequency | cumulative << 16; 0 if it cannot be coded.
KVRAG_HD static u32 encode_entry(u32 frequency, u32 cumulative) {
  return frequency == 0 ? 0 : frequency | cumulative << 16;
}

// Whether the encoder must emit the low word first; never at frequency 4096.
KVRAG_HD static bool must_emit(u32 state, u32 entry) {
  return (state >> (32 - kProbabilityBits)) >= (entry & 0xffff);
}

// The state after the symbol of `entry` has been pushed. The frequency must not be 0.
KVRAG_HD static u32 push(u32 state, u32 entry) {
  const u32 frequency = entry & 0xffff;
  return (state / frequency << kProbabilityBits) + state % frequency + (entry >> 16);
}

// Fill one class's tables, `decode` of 4096 and `encode` of 256 entries, from frequencies that
// sum to 4096.
KVRAG_HD static void fill_tables(const u16* frequencies, u32 num_symbols, u32* decode,
                                 u32* encode) {
  u32 cumulative = 0;
  for (u32 symbol = 0; symbol < kMaxSymbols; ++symbol) {
    const u32 frequency = symbol < num_symbols ? frequencies[symbol] : 0;
    encode[symbol] = encode_entry(frequency, cumulative);
    for (u32 offset = 0; offset < frequency; ++offset) {
      decode[cumulative + offset] = decode_entry(symbol, frequency, offset);
    }
    cumulative += frequency;
  }
}

}  // namespace kvrag::rans

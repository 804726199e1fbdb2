// The entropy coder's loops over one stream, the same for every instruction set. `Simd` supplies a register of `kWidth`
// lanes and its operations; isa_scalar.cpp has the simplest one.
//
// Only the isa_*.cpp include this file. Each is compiled with its own flags, so everything here is
// `static`, as kvrag/common.h explains.
#pragma once

#include <cstring>

#include "kernels.h"
#include "kvrag/rans.h"

namespace kvrag::host {

constexpr u32 kVectorBytes = 2 * rans::kNumLanes;  // the most a vector of lanes can consume
constexpr u32 kSymbolBits = 8;

// Where each lane's table begins, in entries after the start of the row's class.
template <class Simd, bool kContexts>
static typename Simd::Register table_offsets(const u8* contexts, u64 place,
                                             u32 entries_bits) noexcept {
  if constexpr (kContexts) return Simd::offsets(contexts + place, entries_bits);
  return Simd::zero();
}

template <class Simd, bool kContexts>
static Damage decode_rows(const DecodeStream& stream) noexcept {
  using Register = typename Simd::Register;
  constexpr u32 kCount = rans::kNumLanes / Simd::kWidth;
  if (stream.size_bytes < rans::kStateBytes || stream.size_bytes % 2 != 0) {
    return Damage::stream_size;
  }
  u32 states[rans::kNumLanes];
  std::memcpy(states, stream.bytes, sizeof states);
  for (const u32 state : states) {
    if (state < rans::kLowerBound) return Damage::initial_state;
  }
  Register x[kCount];
  for (u32 i = 0; i < kCount; ++i) x[i] = Simd::load(states + i * Simd::kWidth);

  // A vector may read 64 bytes ahead. If fewer are left, the rest is copied to a buffer with room
  // after it. `last` is the last place from which a vector may start.
  const u8* next = stream.bytes + rans::kStateBytes;
  const u8* end = stream.bytes + stream.size_bytes;
  const u8* last = end - next >= i64{kVectorBytes} ? end - kVectorBytes : next - 1;
  u8 tail[2 * kVectorBytes] = {};
  bool in_tail = false;
  const auto may_start = [&]() noexcept {
    if (next <= last) return true;
    if (in_tail) return false;
    in_tail = true;
    const u64 rest = static_cast<u64>(end - next);
    std::memcpy(tail, next, rest);
    next = tail;
    last = end = tail + rest;
    return true;
  };

  const u64 whole = stream.num_tokens & ~u64{rans::kNumLanes - 1};
  const u32 rest = static_cast<u32>(stream.num_tokens - whole);
  for (u64 row = 0; row < stream.num_rows; ++row) {
    const u32* table = stream.tables.slots + u64{stream.classes[row]} * rans::kNumSlots;
    u8* out = stream.symbols + static_cast<i64>(row) * stream.row_stride;
    const u8* contexts =
        kContexts ? stream.contexts + static_cast<i64>(row) * stream.context_stride : nullptr;
    for (u64 token = 0; token < whole; token += rans::kNumLanes) {
      if (__builtin_expect(next > last, 0) && !may_start()) return Damage::words_missing;
      KVRAG_UNROLL
      for (u32 i = 0; i < kCount; ++i) {
        const u64 place = token + i * Simd::kWidth;
        const auto offsets =
            table_offsets<Simd, kContexts>(contexts, place, rans::kProbabilityBits);
        Simd::pop(x[i], table, offsets, next, out + place);
      }
    }
    if (rest != 0) {
      if (!may_start()) return Damage::words_missing;
      u8 symbols[rans::kNumLanes];
      u8 last_contexts[rans::kNumLanes] = {};
      if constexpr (kContexts) std::memcpy(last_contexts, contexts + whole, rest);
      for (u32 place = 0; place < rest; place += Simd::kWidth) {
        const auto offsets =
            table_offsets<Simd, kContexts>(last_contexts, place, rans::kProbabilityBits);
        Simd::pop_first(x[place / Simd::kWidth], rest - place, table, offsets, next,
                        symbols + place);
      }
      std::memcpy(out + whole, symbols, rest);
    }
  }
  if (next > end) return Damage::words_missing;
  if (next != end) return Damage::words_left;
  for (u32 i = 0; i < kCount; ++i) Simd::store(states + i * Simd::kWidth, x[i]);
  for (const u32 state : states) {
    if (state != rans::kLowerBound) return Damage::final_state;
  }
  return Damage::none;
}

template <class Simd>
static void decode_streams(const DecodeStream* streams, u64 count, Damage* damage) noexcept {
  for (u64 i = 0; i < count; ++i) {
    damage[i] = streams[i].contexts == nullptr ? decode_rows<Simd, false>(streams[i])
                                               : decode_rows<Simd, true>(streams[i]);
  }
}

template <class Simd, bool kContexts>
static u8* encode_rows(const EncodeStream& stream, u32* states) noexcept {
  using Register = typename Simd::Register;
  constexpr u32 kCount = rans::kNumLanes / Simd::kWidth;
  Register x[kCount];
  for (u32 i = 0; i < rans::kNumLanes; ++i) states[i] = rans::kLowerBound;
  for (u32 i = 0; i < kCount; ++i) x[i] = Simd::load(states + i * Simd::kWidth);

  const u64 whole = stream.num_tokens & ~u64{rans::kNumLanes - 1};
  const u32 rest = static_cast<u32>(stream.num_tokens - whole);
  u8* next = stream.end;
  for (u64 row = stream.num_rows; row-- > 0;) {
    const u32* table = stream.tables + u64{stream.classes[row]} * rans::kMaxSymbols;
    const u8* in = stream.symbols + static_cast<i64>(row) * stream.row_stride;
    const u8* contexts =
        kContexts ? stream.contexts + static_cast<i64>(row) * stream.context_stride : nullptr;
    bool codable = true;
    if (rest != 0) {
      u8 symbols[rans::kNumLanes] = {};
      u8 last_contexts[rans::kNumLanes] = {};
      std::memcpy(symbols, in + whole, rest);
      if constexpr (kContexts) std::memcpy(last_contexts, contexts + whole, rest);
      for (u32 i = (rest - 1) / Simd::kWidth + 1; i-- > 0;) {
        const u32 place = i * Simd::kWidth;
        const auto offsets = table_offsets<Simd, kContexts>(last_contexts, place, kSymbolBits);
        codable &= Simd::push_first(x[i], rest - place, table, offsets, next, symbols + place);
      }
    }
    for (u64 token = whole; token > 0;) {
      token -= rans::kNumLanes;
      KVRAG_UNROLL
      for (u32 j = 0; j < kCount; ++j) {
        const u32 i = kCount - 1 - j;
        const u64 place = token + i * Simd::kWidth;
        const auto offsets = table_offsets<Simd, kContexts>(contexts, place, kSymbolBits);
        codable &= Simd::push(x[i], table, offsets, next, in + place);
      }
    }
    if (!codable) return nullptr;
  }
  for (u32 i = 0; i < kCount; ++i) Simd::store(states + i * Simd::kWidth, x[i]);
  return next;
}

template <class Simd>
static u8* encode_stream(const EncodeStream& stream, u32* states) noexcept {
  return stream.contexts == nullptr ? encode_rows<Simd, false>(stream, states)
                                    : encode_rows<Simd, true>(stream, states);
}

}  // namespace kvrag::host

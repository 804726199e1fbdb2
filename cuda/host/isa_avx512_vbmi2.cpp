// AVX-512 with VBMI, VBMI2 and VNNI (Ice Lake, Zen 4 and later): decoding without gathers, linear
// layers in 8 bits.
//
// A gather of 16 entries takes as long as all other work on 16 lanes. Here one register holds 16
// bits of all 32 lanes. The states are two registers, the upper and lower halves. So renormalising
// is one comparison, one move and one expansion for all lanes, and the multiplication needs only
// 16 bits. If a class's tables fit into registers, symbols are found there; otherwise in the slots'
// tables in memory.
//
// Each symbol of a lane depends on the one before it, and the latency of a step is far longer than
// its instructions take. So several streams are decoded in parallel.
#define KVRAG_FLOATS 16  // in a register

#include <immintrin.h>

#include <cstring>

#include "grouped_tile.h"
#include "kernels.h"
#include "kvrag/rans.h"
#include "packed_tile.h"

#define KVRAG_INLINE __attribute__((always_inline)) inline

namespace kvrag::host {
namespace {

constexpr u64 kVectorsAtOnce = 16;  // between two looks at how many words are left
constexpr u64 kTokensAtOnce = kVectorsAtOnce * rans::kNumLanes;
constexpr u64 kBytesAtOnce = 2 * kTokensAtOnce;
constexpr u64 kPair = 2 * rans::kNumLanes;  // tokens written at a time
constexpr __mmask32 kAllLanes = 0xffffffffu;

alignas(64) constexpr u16 kEvenWords[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                            22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                            44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
// Even bytes, then odd ones.
alignas(64) constexpr u8 kBytesApart[64] = {
    0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
    44, 46, 48, 50, 52, 54, 56, 58, 60, 62, 1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23,
    25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

u64 least(u64 a, u64 b) { return a < b ? a : b; }

__m512i words(u32 value) { return _mm512_set1_epi16(static_cast<i16>(value)); }

__m512i even_words(__m512i low, __m512i high) {
  return _mm512_permutex2var_epi16(low, _mm512_load_si512(kEvenWords), high);
}

__m512i odd_words(__m512i low, __m512i high) {
  const __m512i odd = _mm512_add_epi16(_mm512_load_si512(kEvenWords), words(1));
  return _mm512_permutex2var_epi16(low, odd, high);
}

// Upper and lower halves of 32 states, and where the next word is.
struct Lanes {
  __m512i high;
  __m512i low;
  const u8* next;
};

// The contents of a slot. `index` is the symbol, or what `symbols` of the row maps to it; `scaled`
// is 16 times the frequency.
struct Found {
  __m512i index;
  __m512i scaled;
  __m512i offset;
};

// Rows without contexts whose tables are BucketTables of at most `kCorrections`.
template <i32 kCorrections>
struct BucketRow {
  static constexpr bool kHasContexts = false;
  static constexpr bool kMayBeCertain = false;

  BucketRow(const DecodeTables& tables, u64 row_class) : table_(tables.buckets[row_class]) {}

  Found find(__m512i slot, __m256i) const {
    constexpr u32 kWidth = BucketTable::kWidth;
    const __m512i in_bucket = _mm512_and_si512(slot, words(kWidth - 1));
    const __m512i middle = look_up(table_.middle, _mm512_srli_epi16(slot, 6));
    const __m512i at_end =
        _mm512_add_epi16(_mm512_min_epu16(slot, words(kWidth - 1)),
                         _mm512_subs_epu16(slot, words(rans::kNumSlots - kWidth)));
    // Bytes; the upper ones are unused.
    const __m512i ends =
        _mm512_maskz_permutex2var_epi8(0x5555555555555555u, _mm512_load_si512(table_.ends), at_end,
                                       _mm512_load_si512(table_.ends + 64));
    __m512i index =
        _mm512_add_epi16(_mm512_srli_epi16(_mm512_add_epi16(middle, in_bucket), 6), ends);
    for (i32 i = 0; i < kCorrections; ++i) {
      const __mmask32 further = _mm512_cmpge_epu16_mask(slot, look_up(table_.next, index));
      index = _mm512_mask_add_epi16(index, further, index, words(1));
    }
    return {index, look_up(table_.scaled, index),
            _mm512_sub_epi16(slot, look_up(table_.start, index))};
  }

  __m512i symbols(__m512i indices) const {
    return _mm512_permutexvar_epi8(indices, _mm512_load_si512(table_.symbols));
  }

 private:
  static __m512i look_up(const u16* table, __m512i index) {
    return _mm512_permutex2var_epi16(_mm512_load_si512(table), index,
                                     _mm512_load_si512(table + 32));
  }

  const BucketTable& table_;
};

// Rows with contexts, if all their tables are digits' tables.
struct DigitRow {
  static constexpr bool kHasContexts = true;
  static constexpr bool kMayBeCertain = false;

  DigitRow(const DecodeTables& all, u64 row_class) {
    const DigitTables& tables = all.digits;
    const u64 leaf = row_class * DigitTables::kLeaves;
    second_ = _mm512_loadu_si512(tables.second + row_class);
    third_ = _mm512_loadu_si512(tables.third + row_class);
    scaled_ = _mm512_loadu_si512(tables.scaled + leaf);
    symbols_ = _mm512_zextsi256_si512(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tables.symbols + leaf)));
  }

  Found find(__m512i slot, __m256i contexts) const {
    const __m512i context = _mm512_cvtepu8_epi16(contexts);
    // Differences are below 0, so beyond all slots as unsigned, for symbols that begin after this
    // slot. The signs give the symbol, and the least difference is the distance to its beginning.
    const __m512i from_second = _mm512_sub_epi16(slot, _mm512_permutexvar_epi16(context, second_));
    const __m512i from_third = _mm512_sub_epi16(slot, _mm512_permutexvar_epi16(context, third_));
    const __m512i leaf =
        _mm512_shldi_epi16(_mm512_shldi_epi16(context, from_second, 1), from_third, 1);
    return {leaf, _mm512_permutexvar_epi16(leaf, scaled_),
            _mm512_min_epu16(slot, _mm512_min_epu16(from_second, from_third))};
  }

  __m512i symbols(__m512i indices) const { return _mm512_permutexvar_epi8(indices, symbols_); }

 private:
  __m512i second_;
  __m512i third_;
  __m512i scaled_;
  __m512i symbols_;
};

// Any row.
template <bool kContexts>
struct SlotRow {
  static constexpr bool kHasContexts = kContexts;
  static constexpr bool kMayBeCertain = true;  // a frequency of 4096, which is scaled to 0

  SlotRow(const DecodeTables& tables, u64 row_class)
      : table_(tables.slots + row_class * rans::kNumSlots) {}

  Found find(__m512i slot, __m256i contexts) const {
    const __m512i first = entries(_mm512_castsi512_si256(slot), _mm256_castsi256_si128(contexts));
    const __m512i second =
        entries(_mm512_extracti64x4_epi64(slot, 1), _mm256_extracti128_si256(contexts, 1));
    const __m512i low = even_words(first, second);
    const __m512i high = odd_words(first, second);
    const __m512i less_one = _mm512_slli_epi16(_mm512_shrdi_epi16(low, high, 8), 4);
    return {_mm512_and_si512(low, words(0xff)), _mm512_add_epi16(less_one, words(16)),
            _mm512_srli_epi16(high, 4)};
  }

  __m512i symbols(__m512i indices) const { return indices; }

 private:
  __m512i entries(__m256i slot, __m128i contexts) const {
    __m512i place = _mm512_cvtepu16_epi32(slot);
    if constexpr (kContexts) {
      const __m512i offset = _mm512_cvtepu8_epi32(contexts);
      place = _mm512_add_epi32(place, _mm512_slli_epi32(offset, rans::kProbabilityBits));
    }
    return _mm512_i32gather_epi32(place, table_, 4);
  }

  const u32* table_;
};

// Pop the symbols that were found from the states of the `active` lanes, and refill.
template <bool kMasked, bool kMayBeCertain>
KVRAG_INLINE void pop(Lanes& lanes, const Found& found, __mmask32 active) {
  // frequency * (state >> 12) + offset, state >> 12 being 16 times the upper half and the 4
  // highest bits of the lower one. Only a frequency of 4096 does not fit.
  const __m512i of_low =
      _mm512_mulhi_epu16(found.scaled, _mm512_and_si512(lanes.low, words(0xf000)));
  const __m512i addend = _mm512_add_epi16(of_low, found.offset);
  __m512i low = _mm512_add_epi16(_mm512_mullo_epi16(found.scaled, lanes.high), addend);
  const __mmask32 carry = _mm512_cmplt_epu16_mask(low, addend);
  __m512i high = _mm512_mulhi_epu16(found.scaled, lanes.high);
  high = _mm512_mask_sub_epi16(high, carry, high, _mm512_set1_epi16(-1));
  if constexpr (kMasked || kMayBeCertain) {
    __mmask32 changed = active;
    // A lane with a certain symbol keeps its state.
    if constexpr (kMayBeCertain) changed &= _mm512_test_epi16_mask(found.scaled, found.scaled);
    low = _mm512_mask_mov_epi16(lanes.low, changed, low);
    high = _mm512_mask_mov_epi16(lanes.high, changed, high);
  }
  // A lane that stays unchanged never has an upper half of 0.
  const __mmask32 refill = _mm512_testn_epi16_mask(high, high);
  lanes.high = _mm512_mask_mov_epi16(high, refill, low);
  lanes.low = _mm512_mask_expand_epi16(low, refill, _mm512_loadu_si512(lanes.next));
  lanes.next += 2 * __builtin_popcount(refill);
}

// A stream between two rows.
class Cursor {
 public:
  // Returns what is wrong with the stream before anything is decoded.
  Damage begin(const DecodeStream& from) {
    stream = &from;
    row = 0;
    if (from.size_bytes < rans::kStateBytes || from.size_bytes % 2 != 0) {
      return Damage::stream_size;
    }
    const __m512i first = _mm512_loadu_si512(from.bytes);
    const __m512i second = _mm512_loadu_si512(from.bytes + 64);
    lanes.low = even_words(first, second);
    lanes.high = odd_words(first, second);
    lanes.next = from.bytes + rans::kStateBytes;
    end_ = from.bytes + from.size_bytes;
    in_tail_ = missing_ = false;
    if (_mm512_testn_epi16_mask(lanes.high, lanes.high) != 0) return Damage::initial_state;
    return Damage::none;
  }

  u64 rows_left() const { return stream->num_rows - row; }
  u64 class_of(u64 ahead) const { return stream->classes[row + ahead]; }
  u8* symbols_of(u64 ahead) const {
    return stream->symbols + static_cast<i64>(row + ahead) * stream->row_stride;
  }
  // nullptr if there are none.
  const u8* contexts_of(u64 ahead) const {
    return stream->contexts + static_cast<i64>(row + ahead) * stream->context_stride;
  }

  // Make sure that `kBytesAtOnce` may be read from `next` on. `next` is that of `lanes`, unless the
  // caller holds it elsewhere.
  void look_ahead(const u8*& next) {
    if (__builtin_expect(end_ - next < i64{kBytesAtOnce}, 0)) near_end(next);
  }

  Damage finish() const {
    if (missing_ || lanes.next > end_) return Damage::words_missing;
    if (lanes.next != end_) return Damage::words_left;
    const __mmask32 high = _mm512_cmpeq_epi16_mask(lanes.high, words(1));
    const __mmask32 low = _mm512_testn_epi16_mask(lanes.low, lanes.low);
    return (high & low) == kAllLanes ? Damage::none : Damage::final_state;
  }

  const DecodeStream* stream;
  u64 row;
  Lanes lanes;

 private:
  // If fewer are left, the rest is copied to a buffer with zeros after it.
  __attribute__((noinline)) void near_end(const u8*& next) {
    if (!in_tail_) {
      const u64 rest = static_cast<u64>(end_ - next);
      std::memset(tail_, 0, sizeof tail_);
      std::memcpy(tail_, next, rest);
      next = tail_;
      end_ = tail_ + rest;
      in_tail_ = true;
    } else if (next > end_) {
      missing_ = true;
      next = end_ = tail_;
    }
  }

  const u8* end_;
  bool in_tail_;
  bool missing_;
  u8 tail_[2 * kBytesAtOnce];
};

__m256i load_contexts(const u8* contexts) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(contexts));
}

__mmask32 first_lanes(u64 count) {
  return static_cast<__mmask32>(count >= 32 ? kAllLanes : (u64{1} << count) - 1);
}

// Decode `count` tokens of one row of each stream; kPair tokens unless kMasked.
template <class Row, u32 kStreams, bool kMasked>
KVRAG_INLINE void decode_pair(Lanes* lanes, const Row* rows, const u8* const* contexts,
                              u8* const* out, u64 token, u64 count) {
  __m512i indices[kStreams];
#pragma GCC unroll 2
  for (u64 half = 0; half < 2; ++half) {
    const u64 done = half * rans::kNumLanes;
    if (kMasked && half == 1 && count <= done) break;
    const __mmask32 active = kMasked ? first_lanes(count - done) : kAllLanes;
#pragma GCC unroll 4
    for (u32 i = 0; i < kStreams; ++i) {
      __m256i context = _mm256_setzero_si256();
      if constexpr (Row::kHasContexts) {
        const u8* from = contexts[i] + token + done;
        context = kMasked ? _mm256_maskz_loadu_epi8(active, from) : load_contexts(from);
      }
      const __m512i slot = _mm512_and_si512(lanes[i].low, words(rans::kNumSlots - 1));
      const Found found = rows[i].find(slot, context);
      indices[i] =
          half == 0 ? found.index : _mm512_or_si512(indices[i], _mm512_slli_epi16(found.index, 8));
      pop<kMasked, Row::kMayBeCertain>(lanes[i], found, active);
    }
  }
#pragma GCC unroll 4
  for (u32 i = 0; i < kStreams; ++i) {
    const __m512i apart = _mm512_permutexvar_epi8(_mm512_load_si512(kBytesApart), indices[i]);
    const __m512i symbols = rows[i].symbols(apart);
    if constexpr (kMasked) {
      const __mmask64 written = first_lanes(count) | u64{first_lanes(count > 32 ? count - 32 : 0)}
                                                         << 32;
      _mm512_mask_storeu_epi8(out[i] + token, written, symbols);
    } else {
      _mm512_storeu_si512(out[i] + token, symbols);
    }
  }
}

// Decode the next `num_rows` rows of each stream.
template <class Row, u32... kIndex>
__attribute__((noinline)) void decode_rows(Cursor* const* cursors, u64 num_rows) noexcept {
  constexpr u32 kStreams = sizeof...(kIndex);
  const u64 num_tokens = cursors[0]->stream->num_tokens;
  Lanes lanes[kStreams] = {cursors[kIndex]->lanes...};
  for (u64 row = 0; row < num_rows; ++row) {
    const Row rows[kStreams] = {
        Row(cursors[kIndex]->stream->tables, cursors[kIndex]->class_of(row))...};
    u8* const out[kStreams] = {cursors[kIndex]->symbols_of(row)...};
    const u8* const contexts[kStreams] = {cursors[kIndex]->contexts_of(row)...};
    for (u64 token = 0; token < num_tokens;) {
      const u64 stop = least(token + kTokensAtOnce, num_tokens);
#pragma GCC unroll 4
      for (u32 i = 0; i < kStreams; ++i) cursors[i]->look_ahead(lanes[i].next);
      for (; token + kPair <= stop; token += kPair) {
        decode_pair<Row, kStreams, false>(lanes, rows, contexts, out, token, kPair);
      }
      if (token < stop) {
        decode_pair<Row, kStreams, true>(lanes, rows, contexts, out, token, stop - token);
        token = stop;
      }
    }
  }
#pragma GCC unroll 4
  for (u32 i = 0; i < kStreams; ++i) {
    cursors[i]->lanes = lanes[i];
    cursors[i]->row += num_rows;
  }
}

constexpr u64 kMostStreams = 4;

template <class Row>
void decode_rows(Cursor* const* cursors, u64 count, u64 num_rows) noexcept {
  switch (count) {
    case 1:
      return decode_rows<Row, 0>(cursors, num_rows);
    case 2:
      return decode_rows<Row, 0, 1>(cursors, num_rows);
    case 3:
      return decode_rows<Row, 0, 1, 2>(cursors, num_rows);
    case kMostStreams:
      return decode_rows<Row, 0, 1, 2, 3>(cursors, num_rows);
  }
}

// How a row can be decoded. Without contexts, later ways work wherever earlier ones do.
enum Way : i32 { kBuckets0, kBuckets1, kBuckets2, kBuckets3, kSlots, kDigits, kContextSlots };
static_assert(kBuckets3 == BucketTable::kMostCorrections, "one way for each");

bool from_memory(Way way) { return way == kSlots || way == kContextSlots; }

Way way_of(const Cursor& cursor, u64 ahead) {
  const DecodeStream& stream = *cursor.stream;
  const u64 row_class = cursor.class_of(ahead);
  if (stream.contexts != nullptr) {
    return stream.most_context < stream.tables.digits.run[row_class] ? kDigits : kContextSlots;
  }
  const i32 corrections = stream.tables.buckets[row_class].corrections;
  return corrections <= kBuckets3 ? static_cast<Way>(corrections) : kSlots;
}

// The latest of several streams' ways.
Way common_way(const Cursor* const* cursors, u64 count, u64 ahead) {
  Way found = way_of(*cursors[0], ahead);
  for (u64 i = 1; i < count; ++i) {
    const Way way = way_of(*cursors[i], ahead);
    found = way > found ? way : found;
  }
  return found;
}

// Decode the next rows of each stream, as many as can be decoded in one way.
void decode_run(Cursor* const* cursors, u64 count) noexcept {
  u64 most = cursors[0]->rows_left();
  for (u64 i = 1; i < count; ++i) most = least(most, cursors[i]->rows_left());
  const Way way = common_way(cursors, count, 0);
  u64 num_rows = 1;
  while (num_rows < most && common_way(cursors, count, num_rows) == way) ++num_rows;
  switch (way) {
    case kBuckets0:
      return decode_rows<BucketRow<0>>(cursors, count, num_rows);
    case kBuckets1:
      return decode_rows<BucketRow<1>>(cursors, count, num_rows);
    case kBuckets2:
      return decode_rows<BucketRow<2>>(cursors, count, num_rows);
    case kBuckets3:
      return decode_rows<BucketRow<3>>(cursors, count, num_rows);
    case kSlots:
      return decode_rows<SlotRow<false>>(cursors, count, num_rows);
    case kDigits:
      return decode_rows<DigitRow>(cursors, count, num_rows);
    case kContextSlots:
      return decode_rows<SlotRow<true>>(cursors, count, num_rows);
  }
}

void decode_streams(const DecodeStream* streams, u64 count, Damage* damage) noexcept {
  Cursor cursors[kMostStreams];
  for (u64 i = 0; i < count; ++i) damage[i] = cursors[i].begin(streams[i]);
  for (;;) {
    Cursor* open[kMostStreams];
    Cursor* slow[kMostStreams];
    u64 num_open = 0, num_slow = 0;
    for (u64 i = 0; i < count; ++i) {
      if (damage[i] != Damage::none || cursors[i].rows_left() == 0) continue;
      open[num_open++] = cursors + i;
      if (from_memory(way_of(cursors[i], 0))) slow[num_slow++] = cursors + i;
    }
    if (num_open == 0) break;
    // Streams that need memory come first, alone; otherwise the others would wait with them.
    if (num_slow != 0) {
      decode_run(slow, num_slow);
    } else {
      decode_run(open, num_open);
    }
  }
  for (u64 i = 0; i < count; ++i) {
    if (damage[i] == Damage::none) damage[i] = cursors[i].finish();
  }
}

}  // namespace

// Everything except decoding and layers in 8 bits is the same as for AVX-512.
const Kernels& avx512_vbmi2() {
  static const Kernels found = [] {
    Kernels kernels = kAvx512;
    kernels.name = "avx512vbmi2";
    kernels.streams_at_once = kMostStreams;
    kernels.decode = decode_streams;
    kernels.packed = packed_tile;
    kernels.pack = pack_tile;
    kernels.int8_quantise = int8_quantise;
    kernels.int8_multiply = int8_multiply;
    kernels.grouped_quantise = grouped_quantise;
    kernels.grouped_multiply = grouped_multiply;
    return kernels;
  }();
  return found;
}

}  // namespace kvrag::host

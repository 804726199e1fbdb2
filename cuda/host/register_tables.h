// Tables small enough for vector registers. Permutations replace loads, on instruction sets that
// permute bytes and words across a whole register.
#pragma once

#include <vector>

#include "kvrag/rans.h"

namespace kvrag::host {

// Finds the symbol of a slot, for a class with 2 to 64 symbols of nonzero frequency. These are
// numbered from 0; a slot's number is how many symbols after the first begin at or before it.
//
// Slots are grouped into buckets of 64. The ends of a bell curve have many narrow symbols, so the
// first and the last bucket have a count for each slot. Each bucket between them stores the first
// symbol that begins within it; each further one takes a comparison.
struct alignas(64) BucketTable {
  static constexpr u32 kSymbols = 64;
  static constexpr u32 kBuckets = 64;
  static constexpr u32 kWidth = rans::kNumSlots / kBuckets;
  static constexpr i32 kMostCorrections = 3;

  // kWidth times the count at the bucket's first slot, plus the distance from where a symbol
  // begins within it to its end. After adding a slot's place in the bucket, the upper bits are the
  // count.
  u16 middle[kBuckets];
  // Counts of the first bucket, then of the last one added to these. The index is
  // min(slot, 63) + max(slot - 4032, 0).
  u8 ends[2 * kWidth];
  u16 scaled[kSymbols];  // 16 times the frequency
  u16 start[kSymbols];   // the frequencies before it
  u16 next[kSymbols];    // where the next one begins, beyond all slots where there is none
  u8 symbols[kSymbols];
  i32 corrections;  // comparisons; beyond kMostCorrections where the model has no such table
};

// Tables of 2 or 3 symbols: a few numbers for each class, so that the tables of several contexts
// fit into one register. They are padded so that a register can be read from any class on.
struct DigitTables {
  static constexpr u32 kContexts = 8;
  static constexpr u32 kLeaves = 4;  // of a class; numbered 3, 1, 0 in the order of the symbols

  const u16* second;  // [num_classes]: where the second symbol begins,
  const u16* third;   // and the third
  const u16* scaled;  // [num_classes, kLeaves]: 16 times the frequency
  const u8* symbols;  // [num_classes, kLeaves]
  const u8* run;      // [num_classes]: how many from this one on have such tables, to kContexts
};

// All tables for decoding streams.
struct DecodeTables {
  const u32* slots;            // [num_classes, 4096]
  const BucketTable* buckets;  // [num_classes]
  DigitTables digits;
};

// The tables of frequencies [num_classes, num_symbols].
class RegisterTables {
 public:
  RegisterTables(const u16* frequencies, u64 num_classes, u32 num_symbols);

  const BucketTable* buckets() const { return buckets_.data(); }
  DigitTables digits() const {
    return {second_.data(), third_.data(), scaled_.data(), symbols_.data(), run_.data()};
  }

 private:
  std::vector<BucketTable> buckets_;
  std::vector<u16> second_, third_, scaled_;
  std::vector<u8> symbols_, run_;
};

}  // namespace kvrag::host

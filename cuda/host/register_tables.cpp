#include "register_tables.h"

#include <algorithm>

namespace kvrag::host {
namespace {

constexpr u16 kBeyond = 0x7fff;  // a start no slot reaches
constexpr u32 kRegisterWords = 32;

struct Symbol {
  u8 symbol;
  u32 frequency;
  u32 start;
};

std::vector<Symbol> used_symbols(const u16* frequencies, u32 num_symbols) {
  std::vector<Symbol> found;
  u32 start = 0;
  for (u32 i = 0; i < num_symbols; ++i) {
    if (frequencies[i] == 0) continue;
    found.push_back({static_cast<u8>(i), frequencies[i], start});
    start += frequencies[i];
  }
  return found;
}

// 16 times the frequency fits 16 bits unless the symbol is the only one.
u16 scaled(u32 frequency) { return static_cast<u16>(frequency << 4); }

BucketTable make_bucket_table(const std::vector<Symbol>& used) {
  constexpr u32 kWidth = BucketTable::kWidth;
  constexpr u32 kLast = rans::kNumSlots - kWidth;  // first slot of the last bucket
  BucketTable table{};
  table.corrections = BucketTable::kMostCorrections + 1;
  if (used.size() < 2 || used.size() > BucketTable::kSymbols) return table;
  for (u64 i = 0; i < used.size(); ++i) {
    table.scaled[i] = scaled(used[i].frequency);
    table.start[i] = static_cast<u16>(used[i].start);
    table.next[i] = i + 1 < used.size() ? static_cast<u16>(used[i + 1].start) : kBeyond;
    table.symbols[i] = used[i].symbol;
  }
  u32 before[BucketTable::kBuckets] = {};  // counts at the bucket's first slot
  u32 within[BucketTable::kBuckets] = {};  // symbols that begin in it, its first slot aside
  u32 place[BucketTable::kBuckets];        // where the first of these does
  std::fill(place, place + BucketTable::kBuckets, kWidth);
  for (u64 i = 1; i < used.size(); ++i) {
    const u32 start = used[i].start;
    if (start < kWidth) {
      for (u32 at = start; at < 2 * kWidth; ++at) ++table.ends[at];
    } else if (start > kLast) {
      for (u32 at = kWidth - 1 + start - kLast; at < 2 * kWidth; ++at) ++table.ends[at];
    } else {
      const u32 bucket = start / kWidth;
      if (start % kWidth != 0) {
        place[bucket] = std::min(place[bucket], start % kWidth);
        ++within[bucket];
      }
      for (u32 b = (start + kWidth - 1) / kWidth; b < BucketTable::kBuckets; ++b) ++before[b];
    }
  }
  u32 most = 1;
  for (u32 b = 0; b < BucketTable::kBuckets; ++b) {
    table.middle[b] = static_cast<u16>(before[b] * kWidth + kWidth - place[b]);
    most = std::max(most, within[b]);
  }
  table.corrections = static_cast<i32>(most) - 1;
  return table;
}

}  // namespace

RegisterTables::RegisterTables(const u16* frequencies, u64 num_classes, u32 num_symbols)
    : second_(num_classes + kRegisterWords, kBeyond),
      third_(num_classes + kRegisterWords, kBeyond),
      scaled_(num_classes * DigitTables::kLeaves + kRegisterWords, 0),
      symbols_(num_classes * DigitTables::kLeaves + kRegisterWords, 0),
      run_(num_classes, 0) {
  constexpr u32 kLeafOf[] = {3, 1, 0};
  buckets_.reserve(num_classes);
  for (u64 i = 0; i < num_classes; ++i) {
    const auto used = used_symbols(frequencies + i * num_symbols, num_symbols);
    buckets_.push_back(make_bucket_table(used));
    if (used.size() < 2 || used.size() > 3) continue;
    run_[i] = 1;
    second_[i] = static_cast<u16>(used[1].start);
    if (used.size() == 3) third_[i] = static_cast<u16>(used[2].start);
    for (u64 k = 0; k < used.size(); ++k) {
      const u64 leaf = i * DigitTables::kLeaves + kLeafOf[k];
      scaled_[leaf] = scaled(used[k].frequency);
      symbols_[leaf] = used[k].symbol;
    }
  }
  for (u64 i = num_classes; i-- > 1;) {
    if (run_[i - 1] == 0) continue;
    run_[i - 1] = static_cast<u8>(std::min<u32>(run_[i] + 1u, DigitTables::kContexts));
  }
}

}  // namespace kvrag::host

// The tables of one entropy model.
#pragma once

#include <memory>

#include "kvrag/rans.h"
#include "register_tables.h"

namespace kvrag::host {

// Checked frequencies [num_classes, num_symbols], and the tables made from them.
class Model {
 public:
  Model(const u16* frequencies, u64 num_classes, u32 num_symbols)
      : num_classes(num_classes),
        num_symbols(num_symbols),
        decode_storage_(new u32[num_classes * rans::kNumSlots + kAlignment]),
        encode_(new u32[num_classes * rans::kMaxSymbols]),
        in_registers_(frequencies, num_classes, num_symbols) {
    // A cache line holds 16 slots; a table that straddles lines would waste one.
    const u64 address = reinterpret_cast<u64>(decode_storage_.get());
    decode_ = decode_storage_.get() + (-address & 63) / sizeof(u32);
    for (u64 i = 0; i < num_classes; ++i) {
      rans::fill_tables(frequencies + i * num_symbols, num_symbols, decode_ + i * rans::kNumSlots,
                        encode_.get() + i * rans::kMaxSymbols);
    }
  }

  const u32* decode() const { return decode_; }
  DecodeTables tables() const { return {decode_, in_registers_.buckets(), in_registers_.digits()}; }
  const u32* encode() const { return encode_.get(); }
  u32 frequency(u64 row_class, u32 symbol) const {
    return encode_[row_class * rans::kMaxSymbols + symbol] & 0xffff;
  }

  const u64 num_classes;
  const u32 num_symbols;

 private:
  static constexpr u64 kAlignment = 16;
  std::unique_ptr<u32[]> decode_storage_;
  std::unique_ptr<u32[]> encode_;
  RegisterTables in_registers_;
  u32* decode_;
};

}  // namespace kvrag::host

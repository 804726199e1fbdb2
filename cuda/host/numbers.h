// Reading whole numbers: eight tokens of a row at a time, as reconstruction points.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace kvrag::host {

// Read eight numbers of one row, from one token on. Only `count` exist; the others are zero.
// Returns false if all are zero; `points` is then undefined.
static inline bool read_points(const Numbers& numbers, u64 row, u64 token, u64 count,
                               Floats8& points) {
  Ints8 found;
  const i64 place = static_cast<i64>(row) * numbers.row_stride + static_cast<i64>(token);
  if (numbers.symbols != nullptr) {
    u64 bytes = 0x8080808080808080u;
    if (count == 8) {
      std::memcpy(&bytes, numbers.symbols + place, 8);
    } else {
      std::memcpy(&bytes, numbers.symbols + place, count);
    }
    if (bytes == 0x8080808080808080u) return false;
    found = __builtin_convertvector(load<Bytes8>(&bytes), Ints8) - kZeroSymbol;
  } else {
    u64 words[2] = {0, 0};
    if (count == 8) {
      std::memcpy(words, numbers.values + place, 16);
    } else {
      std::memcpy(words, numbers.values + place, 2 * count);
    }
    if ((words[0] | words[1]) == 0) return false;
    found = __builtin_convertvector(load<Shorts8>(words), Ints8);
  }
  points = __builtin_convertvector(found, Floats8);
  if (numbers.shrink != nullptr) {
    // Comparisons are 0 or -1 in each lane, so their difference is the sign.
    const Ints8 sign = (found < 0) - (found > 0);
    points -= __builtin_convertvector(sign, Floats8) * numbers.shrink[row];
  }
  return true;
}

// The first patch whose token is not below `token`.
static inline u64 first_patch(const Numbers& numbers, u64 token) {
  return reconstruct::first_patch(numbers.patch_tokens, numbers.num_patches, token);
}

}  // namespace kvrag::host

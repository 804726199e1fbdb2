// The processor's unit that multiplies whole squares of a matrix of bfloat16 (AMX): 16 rows of 32
// numbers by 32 rows of 16. Only for files that are compiled for it.
#pragma once

#include <immintrin.h>

#include "kvrag/common.h"

namespace kvrag::host {
namespace {  // the linker must never use another instruction set's

// Compilers do not know what the unit's instructions read and write: what is before it in the code
// is in memory, and what is after it has not been read yet.
static inline void settle(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// Registers 0 to 3 hold sums, 4 and 5 rows by pairs, 6 and 7 pairs by columns. All are sixteen rows
// of 64 bytes, but sums and pairs have only as many columns as are needed.
struct alignas(64) SquareShapes {
  u8 bytes[64] = {};

  explicit SquareShapes(u64 columns) {
    bytes[0] = 1;  // palette
    for (u32 tile = 0; tile < 8; ++tile) {
      const bool is_rows = tile == 4 || tile == 5;
      bytes[16 + 2 * tile] = is_rows ? 64 : static_cast<u8>(4 * columns);  // bytes of a row
      bytes[48 + tile] = 16;                                               // rows
    }
  }
};

// Other libraries keep shapes of their own on this thread and do not look whether they are still
// there.
class SquareScope {
 public:
  explicit SquareScope(const SquareShapes& ours) {
    settle(before_);
    _tile_storeconfig(before_);
    settle(before_);
    settle(&ours);
    _tile_loadconfig(&ours);
  }
  ~SquareScope() {
    settle(before_);
    if (before_[0] == 0) {
      _tile_release();
    } else {
      _tile_loadconfig(before_);
    }
    settle(before_);
  }
  SquareScope(const SquareScope&) = delete;
  SquareScope& operator=(const SquareScope&) = delete;

 private:
  alignas(64) u8 before_[64];
};

}  // namespace
}  // namespace kvrag::host

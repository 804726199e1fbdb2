// The processor's unit that multiplies whole squares of a matrix of bfloat16 (AMX): 16 rows of 32
// numbers by 32 rows of 16. Only for files that are compiled for it.
#pragma once

#include <immintrin.h>

#include <utility>

#include "kvrag/common.h"

namespace kvrag::host {
namespace {  // the linker must never use another instruction set's

// Compilers do not know what the unit's instructions read and write: what is before it in the code
// is in memory, and what is after it has not been read yet.
static inline void settle(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

typedef i32 SquareLine __attribute__((vector_size(64)));

// One step of a transposition: lanes with the bit kStep of lines without it change places with
// their opposites.
template <int kStep, int... kLane>
static inline void exchange(SquareLine* lines, std::integer_sequence<int, kLane...>) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if ((i & kStep) != 0) continue;
    const SquareLine low = lines[i], high = lines[i + kStep];
    lines[i] =
        __builtin_shufflevector(low, high, ((kLane & kStep) != 0 ? 16 + kLane - kStep : kLane)...);
    lines[i + kStep] =
        __builtin_shufflevector(low, high, ((kLane & kStep) != 0 ? 16 + kLane : kLane + kStep)...);
  }
}

// Exchange rows and columns of 16 lines.
static inline void transpose_square(SquareLine* lines) {
  constexpr std::make_integer_sequence<int, 16> kLanes{};
  exchange<8>(lines, kLanes);
  exchange<4>(lines, kLanes);
  exchange<2>(lines, kLanes);
  exchange<1>(lines, kLanes);
}

// Registers 0 to 3 hold sums: of 4 by 6, 4 by 7, 5 by 6 and 5 by 7. All have sixteen rows.
// Registers 4 and 5 are 64 bytes wide; sums, 6 and 7 are as wide as their columns.
struct alignas(64) SquareShapes {
  u8 bytes[64] = {};

  // Columns of 6 and of 7.
  SquareShapes(u64 first, u64 second) {
    bytes[0] = 1;  // palette
    for (u32 tile = 0; tile < 8; ++tile) {
      const u64 columns = tile == 4 || tile == 5 ? 16 : tile % 2 == 0 ? first : second;
      bytes[16 + 2 * tile] = static_cast<u8>(4 * columns);  // bytes of a row
      bytes[48 + tile] = 16;                                // rows
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

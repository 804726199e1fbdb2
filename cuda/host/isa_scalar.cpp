// Kernels in plain C++: the fallback for all processors, and the file to read first. Every 64-bit
// processor has vectors of four floats; for others the compiler splits them.
#define KVRAG_FLOATS 4  // in a register
#define KVRAG_TOKENS 4  // whose sums fit the registers, two vectors each
#define KVRAG_SUMS 3    // lines of attention whose sums fit the registers
#define KVRAG_UNROLL

#include "attend_tile.h"
#include "elements_tile.h"
#include "grouped_tile.h"
#include "linear_tile.h"
#include "packed_tile.h"
#include "planes.h"
#include "rans_streams.h"
#include "transform_tile.h"

namespace kvrag::host {
namespace {

struct Scalar {
  using Register = u32;
  static constexpr u32 kWidth = 1;

  static Register load(const u32* states) { return *states; }
  static void store(u32* states, Register x) { *states = x; }
  static Register zero() { return 0; }
  static Register offsets(const u8* contexts, u32 bits) { return u32{*contexts} << bits; }

  // Pop one symbol from every lane, in lane order.
  static void pop(Register& x, const u32* table, Register offsets, const u8*& next, u8* out) {
    const u32 entry = table[rans::slot_of(x) + offsets];
    *out = rans::symbol_of(entry);
    const u32 state = rans::pop(x, entry);
    u16 word;
    std::memcpy(&word, next, sizeof word);
    // No branch: whether a lane refills is almost random.
    const bool refill = rans::needs_word(state);
    x = refill ? rans::with_word(state, word) : state;
    next += refill ? 2 : 0;
  }

  // The same for the first `count` lanes; the others stay unchanged.
  static void pop_first(Register& x, u32, const u32* table, Register offsets, const u8*& next,
                        u8* out) {
    pop(x, table, offsets, next, out);
  }

  // Push one symbol to every lane, in reverse lane order; false if it cannot be coded.
  static bool push(Register& x, const u32* table, Register offsets, u8*& next, const u8* in) {
    const u32 entry = table[*in + offsets];
    if (entry == 0) return false;
    if (rans::must_emit(x, entry)) {
      const u16 word = static_cast<u16>(x);
      next -= 2;
      std::memcpy(next, &word, sizeof word);
      x >>= rans::kWordBits;
    }
    x = rans::push(x, entry);
    return true;
  }

  static bool push_first(Register& x, u32, const u32* table, Register offsets, u8*& next,
                         const u8* in) {
    return push(x, table, offsets, next, in);
  }
};

}  // namespace

const Kernels kScalar = {
    "scalar",
    decode_streams<Scalar>,
    1,
    encode_stream<Scalar>,
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

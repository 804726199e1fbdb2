// What every instruction set provides: one table of functions each, chosen at run time.
#pragma once

#include "kvrag/common.h"

namespace kvrag::host {

// What is wrong with a stream; the order is that of `_DAMAGE` in kvrag/native/payload.py.
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

// One stream to decode. Its rows begin at `symbols` and `classes`.
struct DecodeStream {
  const u8* bytes;
  u64 size_bytes;
  const u32* tables;  // [num_classes, 4096]
  const u16* classes;
  const u8* contexts;  // nullptr where a row has one table
  u8* symbols;
  i64 row_stride;
  i64 context_stride;
  u64 num_rows;
  u64 num_tokens;
};

// One stream to encode. Words are written downwards from `end`; below them there must be room
// for one word a symbol and `kEncodeSlack` bytes more, which vector stores may touch.
struct EncodeStream {
  u8* end;
  const u32* tables;  // [num_classes, 256]
  const u16* classes;
  const u8* contexts;
  const u8* symbols;
  i64 row_stride;
  i64 context_stride;
  u64 num_rows;
  u64 num_tokens;
};

constexpr u64 kEncodeSlack = 64;

struct Kernels {
  const char* name;
  Damage (*decode)(const DecodeStream&) noexcept;
  // Returns the first byte of the words and fills `states` [32], or nullptr where a symbol of
  // frequency 0 was met.
  u8* (*encode)(const EncodeStream&, u32* states) noexcept;
};

extern const Kernels kScalar;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

}  // namespace kvrag::host

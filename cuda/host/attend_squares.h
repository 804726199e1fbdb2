// A block's keys and values in bfloat16, for the processor's unit that multiplies whole squares of
// a matrix (AMX): 16 rows of 32 numbers by 32 rows of 16. Included by attend_tile.h, within its
// namespace.
//
// Scores are keys times queries, and the output is values, transposed, times weights. So queries,
// scores, weights and outputs lie as for the other ways, a line of lanes each, and the softmax is
// the same. As for pairs, weights are rounded to bfloat16. A strip that ends within a block
// multiplies up to 31 keys more, with weights of 0: only if their values are infinite or NaN does
// it show.
#pragma once

struct Squares {
  using Element = u16;
  static constexpr u64 kSide = 16;         // rows of a register, and lanes
  static constexpr u64 kDeep = 2 * kSide;  // numbers that one product sums up
  // Registers are always full, so what follows a block's last key is 0.
  static constexpr u64 kKeys = kBlockKeys + kDeep;
  static constexpr u64 kPairLines = kKeys / 2;
  // Keys that are weighed before the unit powers down.
  static constexpr u64 kAwake = 48;
  static_assert(kLanes == 2 * kSide && kBlockKeys % kDeep == 0);

  u16* keys;       // [kKeys, key_dim]
  u16* values;     // [value_dim, kKeys]
  float* weights;  // scratch: lines of pairs

  // Whether products need no odd ends, and the scratch of wide keys holds keys and weights.
  static bool can(const Attention& a) {
    return a.key_dim % kDeep == 0 && a.value_dim % kDeep == 0 &&
           kKeys * a.key_dim / 2 + kPairLines * kLanes <= kBlockKeys * a.key_dim;
  }

  Squares(const Attention& a, const u16* key, const u16* value, u64 count, float* key_scratch,
          float* value_scratch)
      : keys(reinterpret_cast<u16*>(key_scratch)),
        values(reinterpret_cast<u16*>(value_scratch)),
        weights(key_scratch + kKeys * a.key_dim / 2) {
    for (u64 i = 0; i < count; ++i) {
      std::memcpy(keys + i * a.key_dim, key + static_cast<i64>(i) * a.key_row_stride,
                  a.key_dim * sizeof *keys);
    }
    std::memset(keys + count * a.key_dim, 0, (kKeys - count) * a.key_dim * sizeof *keys);
    const u64 filled = (count + kDeep - 1) / kDeep * kDeep;
    for (u64 at = 0; at < filled; at += kDeep) {
      for (u64 d = 0; d < a.value_dim; d += kSide) {
        transpose(value + static_cast<i64>(at) * a.value_row_stride + d, a.value_row_stride,
                  count - at, values + d * kKeys + at);
      }
    }
    for (u64 d = 0; d < a.value_dim; ++d) {
      std::memset(values + d * kKeys + filled, 0, (kKeys - filled) * sizeof *values);
    }
  }

  // Write 16 channels of the first `count` of 32 values, each channel's in a row; others are 0.
  static void transpose(const u16* from, i64 stride, u64 count, u16* to) {
    Ints lines[kSide];
    for (u64 pair = 0; pair < kSide; ++pair) {
      const u16* const low = from + static_cast<i64>(2 * pair) * stride;
      const __m256i first = 2 * pair < count ? load<__m256i>(low) : _mm256_setzero_si256();
      const __m256i second =
          2 * pair + 1 < count ? load<__m256i>(low + stride) : _mm256_setzero_si256();
      lines[pair] = (Ints)_mm512_cvtepu16_epi32(first) | (Ints)_mm512_cvtepu16_epi32(second) << 16;
    }
    transpose_square(lines);
    for (u64 d = 0; d < kSide; ++d) store(to + d * kKeys, lines[d]);
  }

  static void lay(const Attention& a, const u16* query, float* lane) { Pairs::lay(a, query, lane); }

  // Registers 0 to 3 hold sums: 32 lines, each of 32 lanes. Add to them the products of `depth`
  // numbers: 32 rows by pairs of lines.
  static void multiply(const u16* rows, u64 stride, const float* pairs, u64 depth) {
    settle(rows);
    settle(pairs);
    for (u64 at = 0; at < depth; at += kDeep, pairs += kSide * kLanes) {
      _tile_loadd(4, rows + at, stride * sizeof *rows);
      _tile_loadd(6, pairs, kLanes * sizeof *pairs);
      _tile_loadd(7, pairs + kSide, kLanes * sizeof *pairs);
      _tile_loadd(5, rows + kSide * stride + at, stride * sizeof *rows);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  static void store_sums(float* to) {
    constexpr u64 kStride = kLanes * sizeof *to;
    _tile_stored(0, to, kStride);
    _tile_stored(1, to + kSide, kStride);
    _tile_stored(2, to + kSide * kLanes, kStride);
    _tile_stored(3, to + kSide * kLanes + kSide, kStride);
    settle(to);
  }

  // Scores of up to 31 keys more are written too; the block's lines have room for them.
  float score_keys(const Attention& a, const float* queries, u64 first, u64 count,
                   float* scores) const {
    for (u64 key = 0; key < count; key += kDeep) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      multiply(keys + (first + key) * a.key_dim, a.key_dim, queries, a.key_dim);
      store_sums(scores + key * kLanes);
    }
    return factor_of(a);
  }

  void weigh_keys(Softmax& softmax, float* lines, u64 first, u64 count, bool keeps) const {
    const u64 odd = first % 2;
    const u64 half = count > kAwake ? kAwake - odd : count;
    weigh_pairs(softmax, lines, first, half, weights, keeps);
    if (half == count) return;
    // The unit powers down when it has nothing to do, and needs 800 cycles to wake up. This
    // product, whose result is not used, keeps it on.
    _tile_dpbf16ps(3, 4, 6);
    weigh_pairs(softmax, lines + half * kLanes, 0, count - half, weights + kAwake / 2 * kLanes,
                keeps);
  }

  void gather_values(const Attention& a, const float*, u64 first, u64 count, const Line& shrink,
                     float* out) const {
    const u64 num_pairs = pairs_of(first, count);
    const u64 depth = (2 * num_pairs + kDeep - 1) / kDeep * kDeep;
    std::memset(weights + num_pairs * kLanes, 0,
                (depth / 2 - num_pairs) * kLanes * sizeof *weights);
    const u16* const rows = values + first - first % 2;
    for (u64 channel = 0; channel < a.value_dim; channel += kDeep) {
      float* const to = out + channel * kLanes;
      for (u64 i = 0; i < kDeep; ++i) {
        for (u32 v = 0; v < kVectors; ++v) {
          float* const at = to + i * kLanes + v * kWidth;
          store(at, load<Floats>(at) * shrink.at[v]);
        }
      }
      settle(to);
      constexpr u64 kStride = kLanes * sizeof *to;
      _tile_loadd(0, to, kStride);
      _tile_loadd(1, to + kSide, kStride);
      _tile_loadd(2, to + kSide * kLanes, kStride);
      _tile_loadd(3, to + kSide * kLanes + kSide, kStride);
      multiply(rows + channel * kKeys, kKeys, weights, depth);
      store_sums(to);
    }
  }
};

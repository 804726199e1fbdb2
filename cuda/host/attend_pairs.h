// A block's keys and values in bfloat16, two at a time: the processor multiplies pairs of them and adds
// up in float. Included by attend_tile.h, within its namespace.
//
// Weights are rounded to bfloat16 for that, as in PyTorch's attention; scores and sums are not.
#pragma once

static inline Floats add_products(Floats sums, Ints pairs, u32 factors) {
  const __m512bh a = (__m512bh)(__m512i)pairs;
  const __m512bh b = (__m512bh)_mm512_set1_epi32(static_cast<i32>(factors));
  return (Floats)_mm512_dpbf16_ps((__m512)sums, a, b);
}

// Two lines of floats, rounded, as a line of pairs.
static inline Ints paired(Floats low, Floats high) {
  const auto rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Ints)_mm512_permutexvar_epi16(places, rounded);
}

// Turn the scores of `count` keys into weights, as lines of pairs. Pairs of a block begin with even keys: a strip
// that begins or ends within one gives its other key no weight. Keep the weights in `lines` too, if asked to.
template <bool kKeeps>
static inline void weigh_pairs(Softmax& softmax, float* lines, u64 first, u64 count, float* pairs) {
  const auto weigh = [&](u64 key, u32 v) {
    float* const at = lines + key * kLanes + v * kWidth;
    const Floats weight = softmax.weigh<true>(v, load<Floats>(at));
    if (kKeeps) store(at, weight);
    return weight;
  };
  u64 key = 0;
  if (first % 2 == 1 && count > 0) {
    for (u32 v = 0; v < kVectors; ++v) store(pairs + v * kWidth, paired(Floats{}, weigh(0, v)));
    key = 1;
    pairs += kLanes;
  }
  for (; key + 2 <= count; key += 2, pairs += kLanes) {
#pragma GCC unroll 4
    for (u32 v = 0; v < kVectors; ++v) {
      const Floats low = weigh(key, v);
      store(pairs + v * kWidth, paired(low, weigh(key + 1, v)));
    }
  }
  if (key < count) {
    for (u32 v = 0; v < kVectors; ++v) store(pairs + v * kWidth, paired(weigh(key, v), Floats{}));
  }
}

static inline void weigh_pairs(Softmax& softmax, float* lines, u64 first, u64 count, float* pairs,
                               bool keeps) {
  if (keeps) return weigh_pairs<true>(softmax, lines, first, count, pairs);
  weigh_pairs<false>(softmax, lines, first, count, pairs);
}

// How many pairs hold `count` keys of a block from `first` on.
static inline u64 pairs_of(u64 first, u64 count) { return (first % 2 + count + 1) / 2; }

static inline u32 pair_at(const u16* from) {
  u32 pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair;
}

struct Pairs {
  using Element = u16;
  const u16* keys;
  i64 stride;
  const u32* values;  // [pairs of keys, value_dim]
  float* weights;     // scratch: lines of pairs

  // Whether the scratch of wide keys holds all weights, and channels are pairs.
  static bool can(const Attention& a) {
    return a.key_dim % 2 == 0 && kBlockKeys * a.key_dim >= (kBlockKeys / 2 + 1) * kLanes;
  }

  Pairs(const Attention& a, const u16* key, const u16* value, u64 count, float* key_scratch,
        float* value_scratch)
      : keys(key),
        stride(a.key_row_stride),
        values(reinterpret_cast<u32*>(value_scratch)),
        weights(key_scratch) {
    u32* to = reinterpret_cast<u32*>(value_scratch);
    for (u64 pair = 0; pair < (count + 1) / 2; ++pair, to += a.value_dim) {
      const u16* const low = value + static_cast<i64>(2 * pair) * a.value_row_stride;
      if (2 * pair + 1 < count) {
        const u16* const high = low + a.value_row_stride;
        for (u64 d = 0; d < a.value_dim; ++d) to[d] = low[d] | u32{high[d]} << 16;
      } else {
        for (u64 d = 0; d < a.value_dim; ++d) to[d] = low[d];
      }
    }
  }

  static void lay(const Attention& a, const u16* query, float* lane) {
    for (u64 d = 0; d < a.key_dim; d += 2) {
      const u32 pair = pair_at(query + d);
      std::memcpy(lane + d / 2 * kLanes, &pair, sizeof pair);
    }
  }

  float score_keys(const Attention& a, const float* queries, u64 first, u64 count,
                   float* scores) const {
    in_groups<KVRAG_SUMS>(0, count, [&](auto keys_at_once, u64 key) {
      constexpr u32 kCount = decltype(keys_at_once)::value;
      const u16* const rows = keys + static_cast<i64>(first + key) * stride;
      Sums<kCount> sums = {};
#pragma GCC unroll 4
      for (u64 d = 0; d < a.key_dim; d += 2) {
        Ints line[kVectors];
        for (u32 v = 0; v < kVectors; ++v) {
          line[v] = load<Ints>(queries + d / 2 * kLanes + v * kWidth);
        }
#pragma GCC unroll 16
        for (u32 i = 0; i < kCount; ++i) {
          const u32 pair = pair_at(rows + static_cast<i64>(i) * stride + static_cast<i64>(d));
#pragma GCC unroll 4
          for (u32 v = 0; v < kVectors; ++v) sums[i][v] = add_products(sums[i][v], line[v], pair);
        }
      }
      store_sums<kCount>(sums, scores + key * kLanes);
    });
    return factor_of(a);
  }

  void weigh_keys(Softmax& softmax, float* lines, u64 first, u64 count, bool keeps) const {
    weigh_pairs(softmax, lines, first, count, weights, keeps);
  }

  void gather_values(const Attention& a, const float*, u64 first, u64 count, const Line& shrink,
                     float* out) const {
    const u64 num_pairs = pairs_of(first, count);
    const u32* const base = values + first / 2 * a.value_dim;
    in_groups<KVRAG_SUMS>(0, a.value_dim, [&](auto channels, u64 channel) {
      constexpr u32 kCount = decltype(channels)::value;
      float* const to = out + channel * kLanes;
      Sums<kCount> sums;
      load_sums<kCount>(to, shrink, sums);
#pragma GCC unroll 4
      for (u64 pair = 0; pair < num_pairs; ++pair) {
        Ints line[kVectors];
        for (u32 v = 0; v < kVectors; ++v) {
          line[v] = load<Ints>(weights + pair * kLanes + v * kWidth);
        }
#pragma GCC unroll 16
        for (u32 i = 0; i < kCount; ++i) {
          const u32 factors = base[pair * a.value_dim + channel + i];
#pragma GCC unroll 4
          for (u32 v = 0; v < kVectors; ++v) sums[i][v] = add_products(sums[i][v], line[v], factors);
        }
      }
      store_sums<kCount>(sums, to);
    });
  }
};

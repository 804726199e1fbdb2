// Attention of few rows, as in decoding: vectors hold channels, since the rows would fill few lanes
// of a strip. All scores of a position are kept, so the softmax needs one pass. Included by
// attend_tile.h, within its namespace.
#pragma once

// Fewer rows than this would leave most lanes of a strip empty.
constexpr u64 kFewRows = kLanes / 4;
constexpr u32 kHeadsAtOnce = 4;
constexpr u32 kKeysAtOnce = kWidth == 16 ? 4 : 2;
// Registers of values whose sums, for each head, fit the processor's.
constexpr u32 kValuesAtOnce = kWidth == 16 ? 2 : 1;
// How far ahead keys and values are fetched: memory that decoding reads is never in a cache.
constexpr u64 kRowsAhead = 32;

// What a register of values holds: floats, or pairs of bfloat16 (low halves, then high halves).
struct OneValue {
  static constexpr u32 kCount = 1;
  static void spread(const Floats& loaded, Floats* to) { to[0] = loaded; }
  static u64 channel(u32, u32 lane) { return lane; }
};

struct TwoValues {
  static constexpr u32 kCount = 2;
  static void spread(const Ints& loaded, Floats* to) {
    const Ints low = loaded << 16;
    const Ints high = loaded & ~0xffff;
    std::memcpy(to, &low, sizeof *to);
    std::memcpy(to + 1, &high, sizeof *to);
  }
  static u64 channel(u32 half, u32 lane) { return 2 * lane + half; }
};

template <class Way, class Values>
struct Few {
  using Element = typename Way::Element;
  const Attention& a;
  const Element *queries, *keys, *values;  // of one position's query heads, and of their key head
  u64 first, count;                        // keys seen
  float *scores, *apart;                   // [group, count], [group, key_dim]

  // Products of kNumKeys keys with kNumHeads heads' queries from `head` on, in whole registers of
  // channels; return how many channels those are. Inlined, so that sums stay in registers.
  template <u32 kNumHeads, u32 kNumKeys>
  [[gnu::always_inline]] u64 multiply(u64 head, const Element* const (&row)[kNumKeys],
                                      Floats (&sums)[kNumKeys][kNumHeads]) const {
    const Element* const query = queries + static_cast<i64>(head) * a.query_head_stride;
    const float* const laid = apart + head * a.key_dim;
    const i64 ahead = static_cast<i64>(kRowsAhead) * a.key_row_stride;
    u64 d = 0;
    for (; d + Way::kStep <= a.key_dim; d += Way::kStep) {
      typename Way::Inputs x[kNumHeads];
#pragma GCC unroll 4
      for (u32 h = 0; h < kNumHeads; ++h) {
        x[h] = Way::inputs(query + h * a.query_head_stride + d, laid + h * a.key_dim + d);
      }
#pragma GCC unroll 4
      for (u32 k = 0; k < kNumKeys; ++k) {
        __builtin_prefetch(row[k] + d + ahead, 0, 2);
        const auto loaded = Way::weights(row[k] + d);
#pragma GCC unroll 4
        for (u32 h = 0; h < kNumHeads; ++h) Way::add(sums[k][h], loaded, x[h]);
      }
    }
    return d;
  }

  // Scores of kNumKeys keys from `key` on, for kNumHeads heads from `head` on.
  template <u32 kNumHeads, u32 kNumKeys>
  void score(u64 head, u64 key) const {
    const Element* row[kNumKeys];
    for (u32 k = 0; k < kNumKeys; ++k) {
      row[k] = keys + static_cast<i64>(first + key + k) * a.key_row_stride;
    }
    Floats sums[kNumKeys][kNumHeads] = {};
    const u64 d = multiply(head, row, sums);
    float added[kNumKeys][kNumHeads];
    if constexpr (kNumKeys == 4) {
#pragma GCC unroll 4
      for (u32 h = 0; h < kNumHeads; ++h) {
        const Floats of_head[4] = {sums[0][h], sums[1][h], sums[2][h], sums[3][h]};
        float of_keys[4];
        linear::totals(of_head, of_keys);
        for (u32 k = 0; k < 4; ++k) added[k][h] = of_keys[k];
      }
    } else {
#pragma GCC unroll 4
      for (u32 k = 0; k < kNumKeys; ++k) {
#pragma GCC unroll 4
        for (u32 h = 0; h < kNumHeads; ++h) added[k][h] = linear::total(sums[k][h]);
      }
    }
    for (u32 k = 0; k < kNumKeys; ++k) {
      for (u32 h = 0; h < kNumHeads; ++h) {
        float sum = added[k][h];
        const Element* const query = queries + static_cast<i64>(head + h) * a.query_head_stride;
        for (u64 rest = d; rest < a.key_dim; ++rest) {
          sum += widened(query[rest]) * widened(row[k][rest]);
        }
        scores[(head + h) * count + key + k] = sum * factor_of(a);
      }
    }
  }

  // Scores of kWidth keys from `key` on, the same, bit for bit: their sums are folded together.
  // Only for whole registers of channels.
  template <u32 kNumHeads>
  void score_wide(u64 head, u64 key) const {
    // Keys that are kWidth / kKeysAtOnce apart are multiplied together, and fill a vector by turns.
    constexpr u32 kParts = kWidth / kKeysAtOnce;
    Floats parts[kNumHeads][kParts];
#pragma GCC unroll 4
    for (u32 part = 0; part < kParts; ++part) {
      const Element* row[kKeysAtOnce];
#pragma GCC unroll 4
      for (u32 k = 0; k < kKeysAtOnce; ++k) {
        row[k] = keys + static_cast<i64>(first + key + part + k * kParts) * a.key_row_stride;
      }
      Floats sums[kKeysAtOnce][kNumHeads] = {};
      multiply(head, row, sums);
#pragma GCC unroll 4
      for (u32 h = 0; h < kNumHeads; ++h) {
        using linear::fold;
        if constexpr (kKeysAtOnce == 4) {
          parts[h][part] = fold<kWidth / 4>(fold<kWidth / 2>(sums[0][h], sums[2][h]),
                                            fold<kWidth / 2>(sums[1][h], sums[3][h]));
        } else {
          parts[h][part] = fold<kWidth / 2>(sums[0][h], sums[1][h]);
        }
      }
    }
#pragma GCC unroll 4
    for (u32 h = 0; h < kNumHeads; ++h) {
      const Floats found = linear::fold<1>(linear::fold<2>(parts[h][0], parts[h][2]),
                                           linear::fold<2>(parts[h][1], parts[h][3]));
      store(scores + (head + h) * count + key, found * factor_of(a));
    }
  }

  // Turn a head's scores into weights; return what they sum to.
  float weigh(float* of_head) const {
    if (a.softcap != 0.0f) {
      for (u64 key = 0; key < count; ++key) {
        of_head[key] = tanh2(of_head[key] - Floats{})[0] * (a.softcap * kLog2OfE);
      }
    }
    // A NaN need not be found here: its weight is NaN in any case.
    Floats highest = Floats{} + kLowest;
    u64 key = 0;
    for (; key + kWidth <= count; key += kWidth) {
      const Floats found = load<Floats>(of_head + key);
      highest = found > highest ? found : highest;
    }
    float most = kLowest;
    for (u32 i = 0; i < kWidth; ++i) most = std::max(most, highest[i]);
    for (; key < count; ++key) most = std::max(most, of_head[key]);
    Floats sums{};
    key = 0;
    for (; key + kWidth <= count; key += kWidth) {
      const Floats weights = exp2(load<Floats>(of_head + key) - most);
      store(of_head + key, weights);
      sums += weights;
    }
    float sum = linear::total(sums);
    for (; key < count; ++key) sum += of_head[key] = exp2(of_head[key] - most - Floats{})[0];
    return sum;
  }

  // What kNumHeads heads gather in the channels of kRegisters registers, from `channel` on.
  template <u32 kNumHeads, u32 kRegisters>
  void gather(u64 head, u64 channel, const float* shares, Element* const* out) const {
    constexpr u32 kCount = Values::kCount, kParts = kRegisters * kCount;
    const i64 ahead = static_cast<i64>(kRowsAhead) * a.value_row_stride;
    Floats sums[kNumHeads][kParts] = {};
    const Element* row = values + static_cast<i64>(first) * a.value_row_stride + channel;
    for (u64 key = 0; key < count; ++key, row += a.value_row_stride) {
      Floats parts[kParts];
#pragma GCC unroll 2
      for (u32 r = 0; r < kRegisters; ++r) {
        __builtin_prefetch(row + r * Way::kStep + ahead, 0, 2);
        Values::spread(Way::weights(row + r * Way::kStep), parts + r * kCount);
      }
#pragma GCC unroll 4
      for (u32 h = 0; h < kNumHeads; ++h) {
        const float weight = scores[(head + h) * count + key];
#pragma GCC unroll 4
        for (u32 p = 0; p < kParts; ++p) sums[h][p] += parts[p] * weight;
      }
    }
    for (u32 h = 0; h < kNumHeads; ++h) {
      for (u32 p = 0; p < kParts; ++p) {
        Element* const to = out[h] + channel + p / kCount * Way::kStep;
        for (u32 lane = 0; lane < kWidth; ++lane) {
          narrow(sums[h][p][lane] * shares[h], to + Values::channel(p % kCount, lane));
        }
      }
    }
  }

  void attend(Element* out) const {
    in_groups<kHeadsAtOnce>(0, a.group, [&](auto heads, u64 head) {
      constexpr u32 kNumHeads = decltype(heads)::value;
      u64 scored = 0;
      if constexpr (kWidth == 4 * kKeysAtOnce) {
        if (a.key_dim % Way::kStep == 0) {
          for (; scored + kWidth <= count; scored += kWidth) score_wide<kNumHeads>(head, scored);
        }
      }
      in_groups<kKeysAtOnce>(scored, count, [&](auto at_once, u64 key) {
        score<kNumHeads, decltype(at_once)::value>(head, key);
      });
      float shares[kNumHeads];
      Element* to[kNumHeads];
      for (u32 h = 0; h < kNumHeads; ++h) {
        shares[h] = 1.0f / weigh(scores + (head + h) * count);
        to[h] = out + (head + h) * a.value_dim;
      }
      u64 channel = 0;
      constexpr u64 kWide = kValuesAtOnce * Way::kStep;
      for (; channel + kWide <= a.value_dim; channel += kWide) {
        gather<kNumHeads, kValuesAtOnce>(head, channel, shares, to);
      }
      for (; channel + Way::kStep <= a.value_dim; channel += Way::kStep) {
        gather<kNumHeads, 1>(head, channel, shares, to);
      }
      for (; channel < a.value_dim; ++channel) {
        for (u32 h = 0; h < kNumHeads; ++h) {
          float sum = 0;
          for (u64 key = 0; key < count; ++key) {
            const Element* const row = values + static_cast<i64>(first + key) * a.value_row_stride;
            sum += scores[(head + h) * count + key] * widened(row[channel]);
          }
          narrow(sum * shares[h], to[h] + channel);
        }
      }
    });
  }
};

// Rows [begin, end) of a key head: all query heads of some positions.
template <class Way, class Values>
static inline void attend_few(const Attention& a, u64 kv_head, u64 begin, u64 end, float* scratch) {
  using Element = typename Way::Element;
  for (u64 place = begin / a.group; place < end / a.group; ++place) {
    const i64 head = static_cast<i64>(kv_head * a.group);
    const Element* const query = static_cast<const Element*>(a.query) + head * a.query_head_stride +
                                 static_cast<i64>(place) * a.query_row_stride;
    const u64 first = Strip::first_key(a, place);
    const u64 count = static_cast<u64>(a.last_keys[place]) + 1 - first;
    for (u64 h = 0; h < a.group; ++h) {
      const Element* const from = query + static_cast<i64>(h) * a.query_head_stride;
      Way::lay_apart(from, a.key_dim, scratch + h * a.key_dim);
    }
    const Few<Way, Values> few{
        a,
        query,
        static_cast<const Element*>(a.key) + static_cast<i64>(kv_head) * a.key_head_stride,
        static_cast<const Element*>(a.value) + static_cast<i64>(kv_head) * a.value_head_stride,
        first,
        count,
        scratch + a.group * a.key_dim,
        scratch};
    few.attend(static_cast<Element*>(a.out) +
               (place * a.num_kv_heads * a.group + kv_head * a.group) * a.value_dim);
  }
}

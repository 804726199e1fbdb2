// Attention of rows at any positions to the keys before them: a tile of rows of one key head.
//
// Query rows are the lanes of vectors. A strip is as many rows as `kLanes`: position after position,
// each with all query heads that share the key head. Its queries lie transposed, a line of lanes for
// each channel. So a key's scores are the sum of its channels, each times a line, and keys and values
// are read where they are. The softmax is online: each lane keeps the greatest score so far and the
// sum of its weights. A strip walks only the keys that one of its rows sees; since rows ascend, few
// of those are hidden from the others.
#pragma once

#include "kernels.h"
#include "kvrag/reconstruct.h"
#include "linear_tile.h"
#include "vectors.h"

#ifdef KVRAG_SQUARES
#include "squares.h"
#endif

namespace kvrag::host {
namespace {  // also for members: the linker must never use another instruction set's
namespace attention {

constexpr u32 kWidth = KVRAG_FLOATS;
constexpr u32 kVectors = kWidth == 4 ? 4 : 2;
constexpr u32 kLanes = kWidth * kVectors;
constexpr u32 kBlockKeys = kAttentionBlock;
// Below all scores, and yet a number: a difference of two of them is 0.
constexpr float kLowest = -1e30f;
constexpr float kLog2OfE = 1.44269504f;

using Floats = VectorOf<kWidth>::Type;
typedef i32 Ints __attribute__((vector_size(4 * KVRAG_FLOATS)));

// A line of lanes.
struct Line {
  Floats at[kVectors];
};

static inline Line load_line(const float* from) {
  Line line;
  for (u32 v = 0; v < kVectors; ++v) line.at[v] = load<Floats>(from + v * kWidth);
  return line;
}

static inline void store_line(float* to, const Line& line) {
  for (u32 v = 0; v < kVectors; ++v) store(to + v * kWidth, line.at[v]);
}

static inline Line same(float value) {
  Line line;
  for (u32 v = 0; v < kVectors; ++v) line.at[v] = value - Floats{};
  return line;
}

// `x` where it is NaN.
static inline Floats greater(Floats low, Floats x) {
#ifdef __AVX512F__
  return (Floats)_mm512_max_ps((__m512)low, (__m512)x);  // one instruction, which compilers do not find
#else
  return x < low ? low : x;
#endif
}

// NaN stays NaN.
static inline Floats at_least(Floats x, float low) {
  return greater(low - Floats{}, x);
}

static inline Floats at_most(Floats x, float high) {
  const Floats highs = high - Floats{};
  return x > highs ? highs : x;
}

// (2^f - 1) / f for |f| of up to a half: the polynomial of this degree whose greatest relative error in 2^f is
// least, 2e-9.
static inline Floats slope(Floats f) {
  Floats sum = 0.00015353361959569156f * f + 0.0013398875016719103f;
  sum = sum * f + 0.00961843691766262f;
  sum = sum * f + 0.055503323674201965f;
  sum = sum * f + 0.24022647738456726f;
  return sum * f + 0.6931471824645996f;
}

// 2^x = whole (1 + rest); exactly 0 for x of -127 and less. x is at most 127.
struct Power {
  Floats whole, rest;
};

static inline Power power_of_2(Floats x) {
  // Adding it rounds to a whole number, which then is in the lowest bits.
  constexpr float kRound = 12582912.0f;  // 1.5 2^23
  x = at_least(x, -127.0f);
  const Floats rounded = x + kRound;
  const Floats f = x - (rounded - kRound);
  Ints bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  bits = (bits + 127) << 23;
  Power power;
  std::memcpy(&power.whole, &bits, sizeof bits);
  power.rest = slope(f) * f;
  return power;
}

// The same to within 3e-6, for what is rounded to bfloat16 afterwards.
static inline Floats rough_slope(Floats f) {
  const Floats sum = (0.009582854f * f + 0.055906426f) * f + 0.24024099f;
  return sum * f + 0.6931242f;
}

// 2^x; exactly 0 for x of -127 and less, or wherever it is not a normal number. x is at most 127.
template <bool kRough = false>
static inline Floats exp2(Floats x) {
#ifdef __AVX512F__
  const __m512 exponent = (__m512)x;
  const __m512 whole = _mm512_roundscale_ps(exponent, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats f = x - (Floats)whole;
  // Not less: NaN stays NaN. Numbers below the normal ones would take a hundred times as long.
  const __mmask16 is_normal = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Floats part = (kRough ? rough_slope(f) : slope(f)) * f + 1.0f;
  return (Floats)_mm512_maskz_scalef_ps(is_normal, (__m512)part, whole);
#else
  const Power power = power_of_2(x);
  return power.whole * power.rest + power.whole;
#endif
}

// tanh(x ln(2) / 2), exact to the last bits near 0 too.
static inline Floats tanh2(Floats x) {
  const Power power = power_of_2(at_most(at_least(x, -64.0f), 64.0f));
  const Floats less_one = power.whole * power.rest + (power.whole - 1.0f);
  return less_one / (less_one + 2.0f);
}

template <u32 kValue>
struct Count {
  static constexpr u32 value = kValue;
};

// Call `body` for groups of kMost from `begin` on, and for what is left before `end`.
template <u32 kMost, class Body>
static inline void in_groups(u64 begin, u64 end, const Body& body) {
  for (; begin + kMost <= end; begin += kMost) body(Count<kMost>{}, begin);
  if constexpr (kMost > 1) {
    if (begin < end) in_groups<kMost - 1>(begin, end, body);
  }
}

// kCount sums, a line each, in registers.
template <u32 kCount>
using Sums = Floats[kCount][kVectors];

template <u32 kCount>
static inline void load_sums(const float* from, const Line& factor, Sums<kCount>& sums) {
#pragma GCC unroll 16
  for (u32 i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
    for (u32 v = 0; v < kVectors; ++v) {
      sums[i][v] = load<Floats>(from + i * kLanes + v * kWidth) * factor.at[v];
    }
  }
}

template <u32 kCount>
static inline void store_sums(const Sums<kCount>& sums, float* to) {
#pragma GCC unroll 16
  for (u32 i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
    for (u32 v = 0; v < kVectors; ++v) store(to + i * kLanes + v * kWidth, sums[i][v]);
  }
}

// Scores of kCount keys, a line each.
template <u32 kCount>
static inline void score(const float* queries, u64 dim, const float* keys, i64 stride,
                         float* scores) {
  Sums<kCount> sums = {};
#pragma GCC unroll 4
  for (u64 d = 0; d < dim; ++d) {
    const Line line = load_line(queries + d * kLanes);
#pragma GCC unroll 16
    for (u32 i = 0; i < kCount; ++i) {
      const float factor = keys[static_cast<i64>(i) * stride + static_cast<i64>(d)];
#pragma GCC unroll 4
      for (u32 v = 0; v < kVectors; ++v) sums[i][v] += factor * line.at[v];
    }
  }
  store_sums<kCount>(sums, scores);
}

// Shrink kCount channels of the output, a line each, and add what keys give.
template <u32 kCount>
static inline void gather(const float* weights, u64 num_keys, const float* values, i64 stride,
                          const Line& shrink, float* out) {
  Sums<kCount> sums;
  load_sums<kCount>(out, shrink, sums);
#pragma GCC unroll 4
  for (u64 key = 0; key < num_keys; ++key, values += stride) {
    const Line line = load_line(weights + key * kLanes);
#pragma GCC unroll 16
    for (u32 i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
      for (u32 v = 0; v < kVectors; ++v) sums[i][v] += values[i] * line.at[v];
    }
  }
  store_sums<kCount>(sums, out);
}

static inline float widened(float value) { return value; }

static inline float widened(u16 bfloat16) { return reconstruct::from_bf16(bfloat16); }

static inline void narrow(float value, float* out) { *out = value; }
static inline void narrow(float value, u16* out) { *out = reconstruct::to_bf16(value); }

// Where rows of floats begin, and how far they are apart.
struct Matrix {
  const float* rows;
  i64 stride;

  const float* row(u64 number) const { return rows + static_cast<i64>(number) * stride; }
};

static inline Matrix as_floats(const float* rows, i64 stride, u64, u64, float*) {
  return {rows, stride};
}

static inline Matrix as_floats(const u16* rows, i64 stride, u64 num_rows, u64 dim, float* into) {
  for (u64 row = 0; row < num_rows; ++row, rows += stride) {
    for (u64 d = 0; d < dim; ++d) into[row * dim + d] = widened(rows[d]);
  }
  return {into, static_cast<i64>(dim)};
}

// Scores are to base 2, and tanh2 wants twice as much.
static inline float factor_of(const Attention& a) {
  return a.scale * kLog2OfE * (a.softcap == 0.0f ? 1.0f : 2.0f / a.softcap);
}

// Turns scores into weights: 2^(score factor - most), summed up in `total`.
struct Softmax {
  float factor;
  Line most, total;

  template <bool kRough = false>
  Floats weigh(u32 v, const Floats& score) {
    const Floats weight = exp2<kRough>(score * factor - most.at[v]);
    total.at[v] += weight;
    return weight;
  }
};

// A block's keys and values as floats. `first` is the first key of it that a strip sees.
template <class Type>
struct Wide {
  using Element = Type;
  Matrix keys, values;

  Wide(const Attention& a, const Element* key, const Element* value, u64 count, float* key_scratch,
       float* value_scratch)
      : keys(as_floats(key, a.key_row_stride, count, a.key_dim, key_scratch)),
        values(as_floats(value, a.value_row_stride, count, a.value_dim, value_scratch)) {}

  // Write a query into its lane.
  static void lay(const Attention& a, const Element* query, float* lane) {
    const float factor = factor_of(a);
    for (u64 d = 0; d < a.key_dim; ++d) lane[d * kLanes] = widened(query[d]) * factor;
  }

  // Return the factor that scores still lack.
  float score_keys(const Attention& a, const float* queries, u64 first, u64 count,
                   float* scores) const {
    in_groups<KVRAG_SUMS>(0, count, [&](auto keys_at_once, u64 key) {
      score<decltype(keys_at_once)::value>(queries, a.key_dim, keys.row(first + key), keys.stride,
                                           scores + key * kLanes);
    });
    return 1.0f;
  }

  void weigh_keys(Softmax& softmax, float* lines, u64, u64 count, bool) const {
    for (u64 key = 0; key < count; ++key) {
#pragma GCC unroll 4
      for (u32 v = 0; v < kVectors; ++v) {
        float* const at = lines + key * kLanes + v * kWidth;
        store(at, softmax.weigh(v, load<Floats>(at)));
      }
    }
  }

  // Add what the keys that were weighed last give.
  void gather_values(const Attention& a, const float* weights, u64 first, u64 count,
                     const Line& shrink, float* out) const {
    in_groups<KVRAG_SUMS>(0, a.value_dim, [&](auto channels, u64 channel) {
      gather<decltype(channels)::value>(weights, count, values.row(first) + channel, values.stride,
                                        shrink, out + channel * kLanes);
    });
  }
};

#ifdef KVRAG_PAIRS
#include "attend_pairs.h"
#endif
#ifdef KVRAG_SQUARES
#include "attend_squares.h"
#endif

// Rows [begin, end) of a key head: row r is query head r % group of position r / group.
struct Strip {
  float *queries, *out, *top, *sum;  // [key_dim], [value_dim], [1] and [1] lines
  float *first, *end;                // lines of i32: the keys that a lane sees
  u64 begin_row, end_row;
  u64 begin_any, end_any;  // keys that any row sees
  u64 begin_all, end_all;  // keys that all rows see
  bool counts;             // for the mass of keys, with one row at least

  Strip(const Attention& a, u64 from, u64 to, float* scratch)
      : queries(scratch),
        out(queries + a.key_dim * kLanes),
        top(out + a.value_dim * kLanes),
        sum(top + kLanes),
        first(sum + kLanes),
        end(first + kLanes),
        begin_row(from),
        end_row(to) {
    const u64 first_row = from / a.group, last_row = (to - 1) / a.group;
    begin_any = first_key(a, first_row);
    begin_all = first_key(a, last_row);
    end_all = static_cast<u64>(a.last_keys[first_row]) + 1;
    end_any = static_cast<u64>(a.last_keys[last_row]) + 1;
    counts = a.mass != nullptr && last_row >= a.first_counted;
  }

  static u64 first_key(const Attention& a, u64 row) {
    const i64 first = a.last_keys[row] + 1 - a.window;
    return first > 0 ? static_cast<u64>(first) : 0;
  }

  // The row of a lane; lanes beyond the last row repeat it.
  u64 row_of(u32 lane) const { return begin_row + lane < end_row ? begin_row + lane : end_row - 1; }

  template <class Block>
  void start(const Attention& a, u64 kv_head) const {
    using Element = typename Block::Element;
    const Element* base = static_cast<const Element*>(a.query);
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const u64 row = row_of(lane);
      const i64 head = static_cast<i64>(kv_head * a.group + row % a.group);
      const i64 place = static_cast<i64>(row / a.group);
      Block::lay(a, base + head * a.query_head_stride + place * a.query_row_stride, queries + lane);
      const i32 seen[2] = {static_cast<i32>(first_key(a, row / a.group)),
                           static_cast<i32>(a.last_keys[place] + 1)};
      std::memcpy(first + lane, seen, sizeof *seen);
      std::memcpy(end + lane, seen + 1, sizeof *seen);
    }
    for (u64 i = 0; i < a.value_dim * kLanes; ++i) out[i] = 0.0f;
    store_line(top, same(kLowest));
    store_line(sum, same(0.0f));
  }

  // Scores of keys [from, to) of a block that begins with key `start`, a line each. Return the factor that they
  // still lack.
  template <class Block>
  float score_keys(const Attention& a, const Block& block, u64 start, u64 from, u64 to,
                   float* scores) const {
    float factor = block.score_keys(a, queries, from - start, to - from, scores);
    if (a.softcap != 0.0f) {
      for (u64 i = 0; i < (to - from) * kLanes; i += kWidth) {
        store(scores + i, tanh2(load<Floats>(scores + i) * factor) * (a.softcap * kLog2OfE));
      }
      factor = 1.0f;
    }
    if (from >= begin_all && to <= end_all) return factor;
    for (u32 v = 0; v < kVectors; ++v) {
      const Ints firsts = load<Ints>(first + v * kWidth), ends = load<Ints>(end + v * kWidth);
      for (u64 key = from; key < to; ++key) {
        const Ints keys_at = static_cast<i32>(key) - Ints{};
        float* const at = scores + (key - from) * kLanes + v * kWidth;
        const Ints hidden = (keys_at < firsts) | (keys_at >= ends);
        store(at, hidden ? -__builtin_inff() - Floats{} : load<Floats>(at));
      }
    }
    return factor;
  }

  // The greatest of `count` lines. Several are sought at once: each waits for the one before.
  static Line greatest(const float* lines, u64 count) {
    constexpr u64 kAtOnce = 4;
    Line found[kAtOnce];
    for (Line& line : found) line = same(-__builtin_inff());
    const auto take = [&](u64 key, u64 which) {
#pragma GCC unroll 4
      for (u32 v = 0; v < kVectors; ++v) {
        Floats& most = found[which].at[v];
        most = greater(most, load<Floats>(lines + key * kLanes + v * kWidth));
      }
    };
    u64 key = 0;
    for (; key + kAtOnce <= count; key += kAtOnce) {
#pragma GCC unroll 4
      for (u64 i = 0; i < kAtOnce; ++i) take(key + i, i);
    }
    for (; key < count; ++key) take(key, 0);
    for (u64 i = 1; i < kAtOnce; ++i) {
      for (u32 v = 0; v < kVectors; ++v) found[0].at[v] = greater(found[0].at[v], found[i].at[v]);
    }
    return found[0];
  }

  // Leaves the keys' weights in `weights` if they count, and after those of a whole block the scores
  // they are relative to.
  template <class Block>
  void add_keys(const Attention& a, const Block& block, u64 start, u64 from, u64 to,
                float* weights) const {
    const float factor = score_keys(a, block, start, from, to, weights);
    const u64 count = to - from;
    const Line high = greatest(weights, count);
    Softmax softmax{factor, {}, {}};
    Line shrink;
    for (u32 v = 0; v < kVectors; ++v) {
      const Floats before = load<Floats>(top + v * kWidth);
      softmax.most.at[v] = greater(high.at[v] * factor, before);
      shrink.at[v] = exp2(before - softmax.most.at[v]);
      softmax.total.at[v] = load<Floats>(sum + v * kWidth) * shrink.at[v];
    }
    block.weigh_keys(softmax, weights, from - start, count, counts);
    store_line(top, softmax.most);
    store_line(weights + kBlockKeys * kLanes, softmax.most);
    store_line(sum, softmax.total);
    block.gather_values(a, weights, from - start, count, shrink, out);
  }

  // Add what keys [from, to) get to `mass`, once all keys are added.
  void count_keys(const Attention& a, u64 from, u64 to, const float* weights, float* mass) const {
    Line factor;
    for (u32 v = 0; v < kVectors; ++v) {
      const Floats then = load<Floats>(weights + kBlockKeys * kLanes + v * kWidth);
      factor.at[v] = exp2(then - load<Floats>(top + v * kWidth));
      for (u32 i = 0; i < kWidth; ++i) {
        const u64 lane = v * kWidth + i, row = begin_row + lane;
        const bool counted = row < end_row && row / a.group >= a.first_counted;
        factor.at[v][i] = counted ? factor.at[v][i] / sum[lane] : 0.0f;
      }
    }
    for (u64 key = 0; key < to - from; ++key) {
      Floats total{};
      for (u32 v = 0; v < kVectors; ++v) {
        total += load<Floats>(weights + key * kLanes + v * kWidth) * factor.at[v];
      }
      for (u32 i = 0; i < kWidth; ++i) mass[from + key] += total[i];
    }
  }

  template <class Element>
  void finish(const Attention& a, u64 kv_head) const {
    for (u64 row = begin_row; row < end_row; ++row) {
      const u64 head = kv_head * a.group + row % a.group;
      const u64 place = row / a.group * a.num_kv_heads * a.group + head;
      Element* const to = static_cast<Element*>(a.out) + place * a.value_dim;
      const u64 lane = row - begin_row;
      const float share = 1.0f / sum[lane];
      for (u64 d = 0; d < a.value_dim; ++d) narrow(out[d * kLanes + lane] * share, to + d);
    }
  }
};

// The strips of a tile, over its keys.
template <class Block>
struct Tile {
  using Element = typename Block::Element;
  const Attention& a;
  u64 kv_head, begin, end;
  float *weights, *wide_keys, *wide_values, *strips;

  Tile(const Attention& attention, u64 head, u64 first, u64 last, float* scratch)
      : a(attention),
        kv_head(head),
        begin(first),
        end(last),
        weights(scratch),
        wide_keys(weights + attention_weights(kLanes)),
        wide_values(wide_keys + kBlockKeys * a.key_dim),
        strips(wide_values + kBlockKeys * a.value_dim) {}

  // A strip's scratch: the strip, and its weights of all blocks if keys' mass is asked for.
  float* of_strip(u64 row) const {
    const u64 floats = attention_strip(kLanes, a.key_dim, a.value_dim) + attention_kept(a, kLanes);
    return strips + (row - begin) / kLanes * floats;
  }

  template <class Body>
  void each_strip(const Body& body) const {
    for (u64 row = begin; row < end; row += kLanes) {
      body(Strip(a, row, row + kLanes < end ? row + kLanes : end, of_strip(row)));
    }
  }

  // Call `body` with each block of keys, and with each strip that sees some of it: which, and where
  // the strip has its weights.
  template <class Start, class Body>
  void each_block(const Start& start, const Body& body) const {
    const u64 last = static_cast<u64>(a.last_keys[(end - 1) / a.group]) + 1;
    u64 kept = attention_strip(kLanes, a.key_dim, a.value_dim);
    // Blocks begin at the same keys in each tile: how many threads share rows changes no bit.
    const u64 first_seen = Strip::first_key(a, begin / a.group);
    for (u64 from = first_seen - first_seen % kBlockKeys; from < last; from += kBlockKeys) {
      const u64 to = from + kBlockKeys < last ? from + kBlockKeys : last;
      const auto block = start(from, to - from);
      each_strip([&](const Strip& strip) {
        const u64 first = from < strip.begin_any ? strip.begin_any : from;
        const u64 stop = to < strip.end_any ? to : strip.end_any;
        float* const mine = strip.counts ? of_strip(strip.begin_row) + kept : weights;
        if (first < stop) body(strip, block, from, first, stop, mine);
      });
      kept += attention_weights(kLanes);
    }
  }

  // The block of `count` keys from key `from` on.
  Block block_of(u64 from, u64 count) const {
    const Element* const keys = static_cast<const Element*>(a.key) +
                                static_cast<i64>(kv_head) * a.key_head_stride +
                                static_cast<i64>(from) * a.key_row_stride;
    const Element* const values = static_cast<const Element*>(a.value) +
                                  static_cast<i64>(kv_head) * a.value_head_stride +
                                  static_cast<i64>(from) * a.value_row_stride;
    return Block(a, keys, values, count, wide_keys, wide_values);
  }

  void attend() const {
    each_strip([&](const Strip& strip) { strip.template start<Block>(a, kv_head); });
    each_block([&](u64 from, u64 count) { return block_of(from, count); },
               [&](const Strip& strip, const Block& block, u64 start, u64 from, u64 to,
                   float* into) { strip.add_keys(a, block, start, from, to, into); });
    each_strip([&](const Strip& strip) { strip.template finish<Element>(a, kv_head); });
  }

  // Sum up the weights, once it is known what they are relative to in the end.
  void count(float* mass) const {
    each_block([](u64, u64) { return nullptr; },
               [&](const Strip& strip, auto, u64, u64 from, u64 to, const float* kept) {
                 if (strip.counts) strip.count_keys(a, from, to, kept, mass);
               });
  }
};

template <class Block>
static inline void attend(const Attention& a, u64 kv_head, u64 begin, u64 end, float* mass,
                          float* scratch) {
  const Tile<Block> tile(a, kv_head, begin, end, scratch);
  tile.attend();
  if (mass != nullptr) tile.count(mass);
}

#include "attend_few.h"

}  // namespace attention

void attend_tile(const Attention& a, u64 kv_head, u64 begin, u64 end, float* mass,
                 float* scratch) noexcept {
  using namespace attention;
  // Tiles of few rows hold whole positions only if they hold all rows.
  const bool is_few = a.num_rows * a.group <= kFewRows && end - begin == a.num_rows * a.group;
  if (is_few && mass == nullptr) {
    return a.type == ElementType::f32
               ? attend_few<linear::Singles, OneValue>(a, kv_head, begin, end, scratch)
               : attend_few<linear::Halves, TwoValues>(a, kv_head, begin, end, scratch);
  }
  if (a.type == ElementType::f32) return attend<Wide<float>>(a, kv_head, begin, end, mass, scratch);
#ifdef KVRAG_SQUARES
  if (Squares::can(a)) {
    static const SquareShapes shapes(Squares::kSide, Squares::kSide);
    const SquareScope scope(shapes);
    return attend<Squares>(a, kv_head, begin, end, mass, scratch);
  }
#endif
#ifdef KVRAG_PAIRS
  if (Pairs::can(a)) return attend<Pairs>(a, kv_head, begin, end, mass, scratch);
#endif
  attend<Wide<u16>>(a, kv_head, begin, end, mass, scratch);
}

}  // namespace
}  // namespace kvrag::host

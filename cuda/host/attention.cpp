#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "pool.h"
#include "team.h"

namespace kvrag::host {
namespace {

// With fewer multiplications, a second thread costs more than it saves.
constexpr u64 kWorkPerThread = 1 << 20;
// Tiles for each thread, so that none waits long for the last one.
constexpr u64 kTilesPerThread = 4;
// Strips of a tile share keys in the cache; with more, their own state would not fit it.
constexpr u64 kMostStrips = 16;
// Strips that count keys' mass keep a weight for each key and lane: together about as much memory
// as a key head takes.
constexpr u64 kMostCounting = 4;
constexpr u64 kTilesCounting = 16;

i64 bytes_of(i64 elements, ElementType type) {
  return elements * (type == ElementType::f32 ? 4 : 2);
}

void* moved(void* base, i64 elements, ElementType type) {
  return static_cast<char*>(base) + bytes_of(elements, type);
}

const void* moved(const void* base, i64 elements, ElementType type) {
  return static_cast<const char*>(base) + bytes_of(elements, type);
}

// Write a row's keys and values to its prompt's buffer.
void write_row(const NewRows& rows, u64 row, void* keys, void* values, i64 head_stride) {
  const auto copy = [&](const void* from, i64 from_head, i64 from_row, void* to) {
    const i64 dim = static_cast<i64>(rows.dim), at = static_cast<i64>(row);
    for (i64 head = 0; head < static_cast<i64>(rows.num_kv_heads); ++head) {
      std::memcpy(moved(to, head * head_stride + rows.places[row] * dim, rows.type),
                  moved(from, head * from_head + at * from_row, rows.type),
                  static_cast<u64>(bytes_of(dim, rows.type)));
    }
  };
  copy(rows.key, rows.key_head_stride, rows.key_row_stride, keys);
  copy(rows.value, rows.value_head_stride, rows.value_row_stride, values);
}

// What rows [first, first + count) attend with, apart from the number of keys.
Attention attention_of(const NewRows& rows, u64 first, u64 count, const void* keys,
                       const void* values, i64 head_stride) {
  const i64 row = static_cast<i64>(first), dim = static_cast<i64>(rows.dim);
  const i64 out_stride = static_cast<i64>(rows.num_kv_heads * rows.group) * dim;
  Attention one{};
  one.type = rows.type;
  one.query = moved(rows.query, row * rows.query_row_stride, rows.type);
  one.key = keys;
  one.value = values;
  one.out = moved(rows.out, row * out_stride, rows.type);
  one.query_head_stride = rows.query_head_stride;
  one.query_row_stride = rows.query_row_stride;
  one.key_head_stride = one.value_head_stride = head_stride;
  one.key_row_stride = one.value_row_stride = dim;
  one.num_rows = count;
  one.num_kv_heads = rows.num_kv_heads;
  one.group = rows.group;
  one.key_dim = one.value_dim = rows.dim;
  one.last_keys = rows.places + first;
  one.window = rows.window;
  one.scale = rows.scale;
  one.softcap = rows.softcap;
  return one;
}

}  // namespace

void run_attention(const Attention& attention, u32 threads) {
  if (attention.num_rows == 0) {
    if (attention.mass != nullptr)
      std::fill_n(attention.mass, attention.num_kv_heads * attention.num_keys, 0.0f);
    return;
  }
  const Kernels& chosen = kernels();
  const u64 lanes = chosen.attention_lanes;
  const u64 heads = attention.num_kv_heads;
  const u64 rows = attention.num_rows * attention.group;
  const u64 strips = (rows + lanes - 1) / lanes;
  u64 seen = 0;
  for (u64 i = 0; i < attention.num_rows; ++i) {
    seen += static_cast<u64>(std::min(attention.last_keys[i] + 1, attention.window));
  }
  const u64 work = seen * attention.group * heads * (attention.key_dim + attention.value_dim);
  const u64 useful = std::clamp<u64>(work / kWorkPerThread, 1, threads);
  const bool counting = attention.mass != nullptr;
  // The order in which tiles' counts are added must not depend on the number of threads.
  const u64 wanted = counting ? kTilesCounting : useful == 1 ? heads : useful * kTilesPerThread;
  const u64 most = counting ? kMostCounting : kMostStrips;
  const u64 tile_strips = std::clamp<u64>(strips * heads / wanted, 1, most);
  const u64 tile_rows = tile_strips * lanes;
  const u64 tiles = (rows + tile_rows - 1) / tile_rows;
  const u64 floats =
      std::max(attention_scratch(attention, lanes, tile_strips), attention_few(attention));
  // Each tile counts alone; their counts are added in order.
  const u64 keys = attention.num_keys;
  std::vector<float> counts(!counting ? 0 : tiles * heads * keys);
  // The last tiles see most keys: they go first, and the short ones fill the gaps at the end.
  team_for(tiles * heads, useful == 1 ? 1 : threads, [&](u64 i) {
    const u64 begin = (tiles - 1 - i / heads) * tile_rows;
    float* const mass = counts.empty() ? nullptr : &counts[i * keys];
    chosen.attend(attention, i % heads, begin, std::min(begin + tile_rows, rows), mass,
                  scratch(floats));
  });
  if (counts.empty()) return;
  std::copy_n(counts.begin(), heads * keys, attention.mass);
  for (u64 i = heads * keys; i < counts.size(); ++i)
    attention.mass[i % (heads * keys)] += counts[i];
}

void run_attention(const RowOfEach& batch, u32 threads) {
  std::vector<Attention> each(batch.num_rows);
  for (u64 i = 0; i < batch.num_rows; ++i) {
    void* const keys = reinterpret_cast<void*>(batch.key_addresses[i]);
    void* const values = reinterpret_cast<void*>(batch.value_addresses[i]);
    const i64 head_stride = batch.capacities[i] * static_cast<i64>(batch.dim);
    write_row(batch, i, keys, values, head_stride);
    each[i] = attention_of(batch, i, 1, keys, values, head_stride);
    each[i].num_keys = static_cast<u64>(batch.places[i]) + 1;
  }
  // A row of a head is one item of work.
  const Kernels& chosen = kernels();
  const u64 heads = batch.num_kv_heads;
  const u64 strips = (batch.group + chosen.attention_lanes - 1) / chosen.attention_lanes;
  u64 work = 0, floats = 0;
  for (const Attention& one : each) {
    floats = std::max(
        {floats, attention_scratch(one, chosen.attention_lanes, strips), attention_few(one)});
    const u64 seen = static_cast<u64>(std::min(one.last_keys[0] + 1, one.window));
    work += seen * one.group * heads * (one.key_dim + one.value_dim);
  }
  const bool is_shared = work >= 2 * kWorkPerThread;
  team_for(each.size() * heads, is_shared ? threads : 1, [&](u64 i) {
    const Attention& one = each[i / heads];
    chosen.attend(one, i % heads, 0, one.group, nullptr, scratch(floats));
  });
}

void run_attention(const RowsOfOne& rows, u32 threads) {
  for (u64 i = 0; i < rows.num_rows; ++i)
    write_row(rows, i, rows.keys, rows.values, rows.head_stride);
  Attention attention =
      attention_of(rows, 0, rows.num_rows, rows.keys, rows.values, rows.head_stride);
  attention.num_keys = rows.num_keys;
  attention.mass = rows.mass;
  attention.first_counted = rows.first_counted;
  run_attention(attention, threads);
}

}  // namespace kvrag::host

#include "attention.h"

#include <algorithm>
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
// Strips that count keys' mass keep a weight for each key and lane: together about as much memory as
// a key head takes.
constexpr u64 kMostCounting = 4;

}  // namespace

void run_attention(const Attention& attention, u32 threads) {
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
  const u64 wanted = useful == 1 ? heads : useful * kTilesPerThread;
  const u64 most = attention.mass == nullptr ? kMostStrips : kMostCounting;
  const u64 tile_strips = std::clamp<u64>(strips * heads / wanted, 1, most);
  const u64 tile_rows = tile_strips * lanes;
  const u64 tiles = (rows + tile_rows - 1) / tile_rows;
  const u64 floats =
      std::max(attention_scratch(attention, lanes, tile_strips), attention_few(attention));
  // Each tile counts alone; their counts are added in order.
  const u64 keys = attention.num_keys;
  std::vector<float> counts(attention.mass == nullptr ? 0 : tiles * heads * keys);
  // The last tiles see most keys: they go first, and the short ones fill the gaps at the end.
  team_for(tiles * heads, useful == 1 ? 1 : threads, [&](u64 i) {
    const u64 begin = (tiles - 1 - i / heads) * tile_rows;
    float* const mass = counts.empty() ? nullptr : &counts[i * keys];
    chosen.attend(attention, i % heads, begin, std::min(begin + tile_rows, rows), mass,
                  scratch(floats));
  });
  if (counts.empty()) return;
  std::copy_n(counts.begin(), heads * keys, attention.mass);
  for (u64 i = heads * keys; i < counts.size(); ++i) attention.mass[i % (heads * keys)] += counts[i];
}

// One row each: a row of a head is one item of work.
void run_attention(const std::vector<Attention>& each, u32 threads) {
  const Kernels& chosen = kernels();
  u64 work = 0, floats = 0, heads = 0;
  for (const Attention& one : each) {
    heads = one.num_kv_heads;
    const u64 strips = (one.group + chosen.attention_lanes - 1) / chosen.attention_lanes;
    floats = std::max({floats, attention_scratch(one, chosen.attention_lanes, strips),
                       attention_few(one)});
    const u64 seen = static_cast<u64>(std::min(one.last_keys[0] + 1, one.window));
    work += seen * one.group * heads * (one.key_dim + one.value_dim);
  }
  const bool is_shared = work >= 2 * kWorkPerThread;
  team_for(each.size() * heads, is_shared ? threads : 1, [&](u64 i) {
    const Attention& one = each[i / heads];
    chosen.attend(one, i % heads, 0, one.group, nullptr, scratch(floats));
  });
}

}  // namespace kvrag::host

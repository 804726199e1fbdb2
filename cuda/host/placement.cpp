#include "placement.h"

#include <algorithm>

#include "dispatch.h"
#include "pool.h"

namespace kvrag::host {
namespace {

// With fewer multiplications, a second thread costs more than it saves.
constexpr u64 kWorkPerThread = 1 << 21;

template <class Tile>
void run_tiles(const Placement& placement, u64 work, u32 threads, const Tile& tile) {
  const u64 num_tiles = (placement.num_tokens + kTileTokens - 1) / kTileTokens;
  const u64 useful = std::clamp<u64>(work / kWorkPerThread, 1, threads);
  parallel_for(num_tiles, static_cast<u32>(useful), [&](u64 i) {
    tile(i * kTileTokens, std::min((i + 1) * kTileTokens, placement.num_tokens));
  });
}

}  // namespace

void run_transform(const Numbers& numbers, const Transform& transform, const Placement& placement,
                   u32 threads) {
  const Kernels& chosen = kernels();
  const u64 num_channels = placement.num_heads * placement.head_dim;
  const u64 num_floats = transform_scratch(numbers.num_rows, placement.head_dim);
  run_tiles(placement, placement.num_tokens * num_channels * numbers.num_rows, threads,
            [&](u64 begin, u64 end) {
              chosen.transform(numbers, transform, placement, begin, end, scratch(num_floats));
            });
}

void run_packed(const PackedPart* parts, u64 num_parts, u32 threads) {
  const Kernels& chosen = kernels();
  u64 work = 0, num_floats = 0;
  for (const PackedPart* part = parts; part < parts + num_parts; ++part) {
    const Packed& packed = part->packed;
    work += packed.num_bands * packed.num_numbers * packed.band_channels / 4;
    num_floats = std::max(num_floats, packed_scratch(packed));
  }
  run_tiles(parts->placement, parts->placement.num_tokens * work, threads, [&](u64 begin, u64 end) {
    for (const PackedPart* part = parts; part < parts + num_parts; ++part) {
      chosen.packed(part->packed, part->placement, begin, end, scratch(num_floats));
    }
  });
}

void run_packing(const Packing& packing, u64 num_tokens) { kernels().pack(packing, 0, num_tokens); }

}  // namespace kvrag::host

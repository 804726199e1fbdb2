// Permutations that spread consecutive words over the lanes of a mask, or pack lanes again, for
// instruction sets without such an instruction.
#pragma once

#include "kvrag/common.h"

namespace kvrag::host {

// For each mask of `kWidth` lanes, one index for each lane:
// `expand`: the lane's rank among the set lanes (any value for lanes that are not set);
// `pack_high`: the lane's source if the set lanes are packed, in order, into the highest lanes.
template <u32 kWidth>
struct LaneTables {
  alignas(64) u8 expand[1u << kWidth][kWidth];
  alignas(64) u8 pack_high[1u << kWidth][kWidth];
};

template <u32 kWidth>
static constexpr LaneTables<kWidth> make_lane_tables() {
  LaneTables<kWidth> tables{};
  for (u32 mask = 0; mask < 1u << kWidth; ++mask) {
    u32 count = 0;
    for (u32 lane = 0; lane < kWidth; ++lane) {
      tables.expand[mask][lane] = static_cast<u8>(count);
      count += mask >> lane & 1;
    }
    u32 place = kWidth - count;
    for (u32 lane = 0; lane < kWidth; ++lane) {
      if (mask >> lane & 1) tables.pack_high[mask][place++] = static_cast<u8>(lane);
    }
  }
  return tables;
}

}  // namespace kvrag::host

#include "linear.h"

#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "kvrag/reconstruct.h"
#include "pool.h"
#include "team.h"

namespace kvrag::host {
namespace {

// With fewer weights, a second thread costs more than it saves.
constexpr u64 kWeightsPerThread = 1 << 16;
// Shares begin at multiples of this.
constexpr u64 kStep = 16;
// Rows that one task quantises, and rows and products of a task that multiplies.
constexpr u64 kQuantisedRows = 32;
constexpr u64 kMultipliedRows = 96;
constexpr u64 kProducts = 1 << 17;

constexpr u64 parts_of(u64 count, u64 size) { return (count + size - 1) / size; }

}  // namespace

void run_linear(const Linear& layer, u32 threads) {
  if (layer.num_rows == 0) return;
  const u64 work = layer.num_inputs * layer.num_outputs;
  const u64 parts = std::clamp<u64>(work / kWeightsPerThread, 1, threads);
  const u64 share = ((layer.num_outputs + parts - 1) / parts + kStep - 1) / kStep * kStep;
  const auto run = kernels().linear;
  team_for(parts, parts == 1 ? 1 : threads, [&](u64 part) {
    const u64 begin = std::min(part * share, layer.num_outputs);
    run(layer, begin, std::min(begin + share, layer.num_outputs), scratch(linear_scratch(layer)));
  });
}

void run_int8_linear(const Int8Linear& layer, u32 threads) {
  if (layer.num_rows == 0) return;
  const u64 stride = int8_stride(layer.num_inputs);
  const u64 value_floats = parts_of(layer.num_rows * stride, sizeof(float));
  float* const place = scratch(value_floats + 2 * layer.num_rows);
  const Int8Rows rows{reinterpret_cast<i8*>(place), place + value_floats,
                      reinterpret_cast<i32*>(place + value_floats + layer.num_rows)};
  const u64 parts = parts_of(layer.num_rows, kQuantisedRows);
  team_for(parts, parts == 1 ? 1 : threads, [&](u64 part) {
    const u64 begin = part * kQuantisedRows;
    kernels().int8_quantise(layer, rows, begin, std::min(begin + kQuantisedRows, layer.num_rows));
  });
  const u64 panels = parts_of(layer.num_outputs, kInt8Panel);
  const u64 most_rows = std::min(layer.num_rows, kMultipliedRows);
  const u64 share = std::clamp<u64>(kProducts / (most_rows * stride * kInt8Panel + 1), 1, panels);
  const u64 shares = parts_of(panels, share);
  const u64 tasks = shares * parts_of(layer.num_rows, kMultipliedRows);
  // Tasks that follow each other share the weights.
  team_for(tasks, tasks == 1 ? 1 : threads, [&](u64 task) {
    const u64 blocks = tasks / shares;
    const u64 begin = task % blocks * kMultipliedRows;
    const u64 end = std::min(begin + kMultipliedRows, layer.num_rows);
    const u64 first = task / blocks * share;
    for (u64 panel = first; panel < std::min(first + share, panels); ++panel) {
      kernels().int8_multiply(layer, rows, begin, end, panel);
    }
  });
}

void run_grouped_linear(const GroupedLinear& layer, u32 threads) {
  if (layer.num_rows == 0) return;
  const u64 groups = grouped_groups(layer.num_inputs), all = layer.num_rows * groups;
  const u64 value_floats = all * kGroup / sizeof(float);
  float* const place = scratch(value_floats + 3 * all);
  const GroupedRows rows{reinterpret_cast<i8*>(place), place + value_floats,
                         reinterpret_cast<i32*>(place + value_floats + all)};
  const u64 parts = parts_of(layer.num_rows, kQuantisedRows);
  team_for(parts, parts == 1 ? 1 : threads, [&](u64 part) {
    const u64 begin = part * kQuantisedRows;
    kernels().grouped_quantise(layer, rows, begin,
                               std::min(begin + kQuantisedRows, layer.num_rows));
  });
  const u64 panels = parts_of(layer.num_outputs, kInt8Panel);
  const u64 most_rows = std::min(layer.num_rows, kGroupedRows);
  const u64 share =
      std::clamp<u64>(kProducts / (most_rows * groups * kGroup * kInt8Panel + 1), 1, panels);
  const u64 shares = parts_of(panels, share);
  const u64 blocks = parts_of(layer.num_rows, kGroupedRows);
  // Tasks that follow each other share the weights.
  team_for(shares * blocks, shares * blocks == 1 ? 1 : threads, [&](u64 task) {
    const u64 begin = task % blocks * kGroupedRows;
    const u64 end = std::min(begin + kGroupedRows, layer.num_rows);
    const u64 first = task / blocks * share;
    for (u64 panel = first; panel < std::min(first + share, panels); ++panel) {
      kernels().grouped_multiply(layer, rows, begin, end, panel);
    }
  });
}

namespace {

float from_half(u16 bits) {
  const u32 shifted = (bits & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &shifted, sizeof value);
  return (bits & 0x8000 ? -value : value) * 0x1p112f;
}

// The number that an input's weight is stored as; see `GroupedLinear`.
u32 number_at(const GroupedLinear& layer, u64 output, u64 input) {
  const u64 panel = output / kInt8Panel, group = input / kGroup, quad = input % kGroup / 4;
  const u8* const bytes =
      layer.weight +
      (panel * grouped_groups(layer.num_inputs) + group) * grouped_bytes(layer.bits) +
      4 * (output % kInt8Panel) + input % 4;
  const auto plane = [&](u64 number) { return u32{bytes[4 * number * kInt8Panel]}; };
  if (layer.bits == 8) return plane(quad);
  const u32 low = plane(quad / 2) >> 4 * (quad % 2) & 15;
  if (layer.bits == 5) return low | (plane(4) >> quad & 1) << 4;
  if (layer.bits == 6) return low | (plane(4 + quad / 4) >> 2 * (quad % 4) & 3) << 4;
  return low;
}

}  // namespace

void unpack_grouped(const GroupedLinear& layer, const i64* outputs, u64 count, u32 threads) {
  const u64 groups = grouped_groups(layer.num_inputs);
  const u64 parts_in_group = layer.bits == 6 ? 2 : 1;
  const float half_range = static_cast<float>(1u << (layer.bits - 1));
  const u64 share = kQuantisedRows, parts = parts_of(count, share);
  team_for(parts, parts == 1 ? 1 : threads, [&](u64 part) {
    for (u64 row = part * share; row < std::min((part + 1) * share, count); ++row) {
      const u64 output = static_cast<u64>(outputs[row]);
      const u64 lane = output % kInt8Panel, first = output / kInt8Panel * groups;
      for (u64 input = 0; input < layer.num_inputs; ++input) {
        const u64 group = first + input / kGroup,
                  scaled = input % kGroup / (kGroup / parts_in_group);
        const float scale =
            from_half(layer.scale[(group * parts_in_group + scaled) * kInt8Panel + lane]);
        const float least = layer.least == nullptr
                                ? -half_range * scale
                                : from_half(layer.least[group * kInt8Panel + lane]);
        const float value =
            (static_cast<float>(number_at(layer, output, input)) * scale + least) * layer.factor;
        const u64 at = row * layer.num_inputs + input;
        if (layer.type == ElementType::f32) {
          static_cast<float*>(layer.out)[at] = value;
        } else {
          static_cast<u16*>(layer.out)[at] = reconstruct::to_bf16(value);
        }
      }
    }
  });
}

}  // namespace kvrag::host

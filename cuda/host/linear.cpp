#include "linear.h"

#include <algorithm>

#include "dispatch.h"
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

}  // namespace kvrag::host

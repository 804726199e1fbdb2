#include "linear.h"

#include <algorithm>

#include "dispatch.h"
#include "pool.h"
#include "team.h"

namespace kvrag::host {
namespace {

// With fewer weights, a second thread costs more than it saves.
constexpr u64 kWeightsPerThread = 1 << 16;
// Outputs that begin together: a multiple of what the kernels take at once.
constexpr u64 kStep = 16;

}  // namespace

void run_linear(const Linear& layer, u32 threads) {
  const u64 work = layer.num_inputs * layer.num_outputs;
  const u64 parts = std::clamp<u64>(work / kWeightsPerThread, 1, threads);
  const u64 share = ((layer.num_outputs + parts - 1) / parts + kStep - 1) / kStep * kStep;
  const auto run = kernels().linear;
  team_for(parts, parts == 1 ? 1 : threads, [&](u64 part) {
    const u64 begin = std::min(part * share, layer.num_outputs);
    run(layer, begin, std::min(begin + share, layer.num_outputs),
        scratch(layer.num_rows * layer.num_inputs));
  });
}

}  // namespace kvrag::host

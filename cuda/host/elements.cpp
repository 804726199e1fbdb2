#include "elements.h"

#include <algorithm>

#include "dispatch.h"
#include "team.h"

namespace kvrag::host {
namespace {

// With fewer numbers, a second thread costs more than it saves.
constexpr u64 kNumbersPerThread = 1 << 16;

// Call `run` for parts of `count` items, each of `size` numbers.
template <class Run>
void in_parts(u64 count, u64 size, u32 threads, const Run& run) {
  const u64 parts = std::clamp<u64>(count * size / kNumbersPerThread, 1, threads);
  const u64 share = (count + parts - 1) / parts;
  team_for(parts, static_cast<u32>(parts), [&](u64 part) {
    const u64 begin = std::min(part * share, count);
    run(begin, std::min(begin + share, count));
  });
}

}  // namespace

void run_norm(const Norm& norm, u64 num_rows, u32 threads) {
  in_parts(num_rows, norm.width, threads,
           [&](u64 begin, u64 end) { kernels().norm(norm, begin, end); });
}

void run_gate(const Gate& gate, u64 count, u32 threads) {
  in_parts(count, 1, threads, [&](u64 begin, u64 end) { kernels().gate(gate, begin, end); });
}

void run_rotation(const Rotation& rotation, u64 num_heads, u64 num_tokens) {
  for (u64 head = 0; head < num_heads; ++head) kernels().rotate(rotation, head, 0, num_tokens);
}

}  // namespace kvrag::host

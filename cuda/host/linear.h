// Linear layers, shared among threads: over few rows, and in 8 bits.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_linear(const Linear& layer, u32 threads);
void run_int8_linear(const Int8Linear& layer, u32 threads);
void run_grouped_linear(const GroupedLinear& layer, u32 threads);
// Write weights of outputs as numbers: to [count, num_inputs], the layer's `out`.
void unpack_grouped(const GroupedLinear& layer, const i64* outputs, u64 count, u32 threads);

}  // namespace kvrag::host

// Linear layers, shared among threads: over few rows, and in 8 bits.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_linear(const Linear& layer, u32 threads);
void run_int8_linear(const Int8Linear& layer, u32 threads);

}  // namespace kvrag::host

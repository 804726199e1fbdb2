// A linear layer over few rows, its outputs shared among threads.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_linear(const Linear& layer, u32 threads);

}  // namespace kvrag::host

// Norms and gates, shared among threads.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_norm(const Norm& norm, u64 num_rows, u32 threads);
void run_gate(const Gate& gate, u64 count, u32 threads);

}  // namespace kvrag::host

// Norms and gates, shared among threads; rotations, for whose callers threads are others' work.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_norm(const Norm& norm, u64 num_rows, u32 threads);
void run_gate(const Gate& gate, u64 count, u32 threads);
void run_rotation(const Rotation& rotation, u64 num_heads, u64 num_tokens);

}  // namespace kvrag::host

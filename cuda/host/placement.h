// Reconstruction of many tokens: tiles spread over threads.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_transform(const Numbers& numbers, const Transform& transform, const Placement& placement,
                   u32 threads);
void run_packed(const PackedPart* parts, u64 num_parts, u32 threads);
void run_packing(const Packing& packing, u64 num_tokens);

}  // namespace kvrag::host

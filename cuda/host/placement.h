// Reconstruction of many tokens: tiles spread over threads.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_transform(const Numbers& numbers, const Transform& transform, const Placement& placement,
                   u32 threads);

}  // namespace kvrag::host

// Attention of all rows and heads, shared among threads.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_attention(const Attention& attention, u32 threads);

}  // namespace kvrag::host

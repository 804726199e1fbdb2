// Attention of all rows and heads, shared among threads.
#pragma once

#include <vector>

#include "kernels.h"

namespace kvrag::host {

void run_attention(const Attention& attention, u32 threads);

// Several with one row each, as in a batch that decodes: all have the same heads, and no mass.
void run_attention(const std::vector<Attention>& each, u32 threads);

}  // namespace kvrag::host

// Chooses the instruction set's kernels.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace kvrag::host {

// The kernels that this processor can run, slowest first.
std::vector<const Kernels*> available_kernels();

// The kernels in use: the fastest, unless `use_kernels` chose others.
const Kernels& kernels();

// Use the kernels of that name from now on; false if there are none.
bool use_kernels(const std::string& name);

}  // namespace kvrag::host

// Which of the instruction sets' kernels run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace kvrag::host {

// Those this processor can run, slowest first.
std::vector<const Kernels*> available_kernels();

// Those in use: the fastest, unless `use_kernels` said otherwise.
const Kernels& kernels();

// Use those of that name from now on; false where there are none.
bool use_kernels(const std::string& name);

}  // namespace kvrag::host

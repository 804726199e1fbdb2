// Work for the thread that computes a model, shared with the threads that PyTorch computes with.
#pragma once

#include <functional>

#include "kvrag/common.h"

namespace kvrag::host {

// As `parallel_for`, on the threads of the caller's OpenMP runtime, if the process has GNU's or a
// compatible one. Between two operators PyTorch's threads spin and wait for the next: threads of
// our own would have to wake beside them, and share their cores.
void team_for(u64 count, u32 threads, const std::function<void(u64)>& body);

}  // namespace kvrag::host

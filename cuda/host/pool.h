// Threads that wait for work, shared by all calls of a process.
#pragma once

#include <functional>

#include "kvrag/common.h"

namespace kvrag::host {

// Run `body(0)` to `body(count - 1)`, each once, on the calling thread and up to `threads - 1`
// others; return when all are done. `body` must not throw. Several threads may call this at the
// same time and share the idle threads. A call never waits for a thread that serves another call.
void parallel_for(u64 count, u32 threads, const std::function<void(u64)>& body);

// This thread's scratch, aligned to 64 bytes. It grows to the largest that was asked for, and is
// kept: allocating for every call would touch fresh pages each time.
float* scratch(u64 num_floats);

}  // namespace kvrag::host

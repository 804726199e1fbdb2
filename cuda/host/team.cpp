#include "team.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>

#include "pool.h"

namespace kvrag::host {
namespace {

// GNU's OpenMP runtime: run `body(data)` on a team of `threads` threads, the caller among them.
using RunTeam = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

struct Work {
  u64 count;
  const std::function<void(u64)>* body;
  std::atomic<u64> next{0};
};

void take_part(void* data) {
  Work& work = *static_cast<Work*>(data);
  for (u64 i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.count;) {
    (*work.body)(i);
  }
}

// Found by name: PyTorch brings its own copy of the runtime, and another one would have other
// threads. Asked at the first use, which follows PyTorch's import.
RunTeam runtime() {
  static const RunTeam found = reinterpret_cast<RunTeam>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

const pid_t kOwner = getpid();

}  // namespace

void team_for(u64 count, u32 threads, const std::function<void(u64)>& body) {
  // A forked child has none of the team's threads, and the runtime would wait for them.
  if (threads <= 1 || count <= 1 || runtime() == nullptr || kOwner != getpid()) {
    parallel_for(count, threads, body);
    return;
  }
  Work work{count, &body};
  runtime()(take_part, &work, threads, 0);
}

}  // namespace kvrag::host

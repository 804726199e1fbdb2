#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvrag::host {
namespace {

struct Task {
  u64 count;
  const std::function<void(u64)>* body;
  std::atomic<u64> next{0};
  u32 helpers = 0;  // threads that took a ticket and are not yet done; guarded by the pool

  void work() {
    for (u64 i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) (*body)(i);
  }
};

class Pool {
 public:
  void run(Task& task, u32 wanted) {
    {
      const std::lock_guard lock(mutex_);
      while (num_threads_ < wanted && start_thread()) {
      }
      for (u32 i = 0; i < std::min(wanted, num_threads_); ++i) tickets_.push_back(&task);
    }
    wake_.notify_all();
    task.work();
    std::unique_lock lock(mutex_);
    // Tickets that no thread took are void: all indices are taken.
    tickets_.erase(std::remove(tickets_.begin(), tickets_.end(), &task), tickets_.end());
    done_.wait(lock, [&task] { return task.helpers == 0; });
  }

 private:
  bool start_thread() {
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      return false;  // a limit of the system: the caller works alone
    }
    ++num_threads_;
    return true;
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !tickets_.empty(); });
      Task* task = tickets_.front();
      tickets_.pop_front();
      ++task->helpers;
      lock.unlock();
      task->work();
      lock.lock();
      if (--task->helpers == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<Task*> tickets_;
  u32 num_threads_ = 0;
};

// Never destroyed: its threads may still wait when the process ends. A forked child has none of the
// threads, so it makes a new pool.
Pool& pool() {
  static std::mutex mutex;
  static Pool* current = nullptr;
  static pid_t owner = 0;
  const std::lock_guard lock(mutex);
  if (owner != getpid()) {
    current = new Pool;
    owner = getpid();
  }
  return *current;
}

}  // namespace

void parallel_for(u64 count, u32 threads, const std::function<void(u64)>& body) {
  const u64 helpers = std::min<u64>(threads, count);
  if (helpers <= 1) {
    for (u64 i = 0; i < count; ++i) body(i);
    return;
  }
  Task task{count, &body};
  pool().run(task, static_cast<u32>(helpers - 1));
}

float* scratch(u64 num_floats) {
  thread_local std::unique_ptr<float[]> storage;
  thread_local u64 capacity = 0;
  constexpr u64 kAlignment = 16;
  if (capacity < num_floats) {
    storage.reset();
    storage.reset(new float[num_floats + kAlignment]);
    capacity = num_floats;
  }
  const u64 address = reinterpret_cast<u64>(storage.get());
  return storage.get() + (-address & 63) / sizeof(float);
}

}  // namespace kvrag::host

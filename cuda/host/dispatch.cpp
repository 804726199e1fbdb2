#include "dispatch.h"

#include <atomic>

namespace kvrag::host {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found{&kScalar};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) found.push_back(&kAvx2);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(&kAvx512);
    if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
        __builtin_cpu_supports("avx512vnni")) {
      found.push_back(&avx512_vbmi2());
      if (__builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16());
    }
  }
#elif defined(__aarch64__)
  found.push_back(&kNeon);
#endif
  return found;
}

static std::atomic<const Kernels*> current{nullptr};

const Kernels& kernels() {
  const Kernels* chosen = current.load(std::memory_order_relaxed);
  if (chosen == nullptr) {
    chosen = available_kernels().back();
    current.store(chosen, std::memory_order_relaxed);
  }
  return *chosen;
}

bool use_kernels(const std::string& name) {
  for (const Kernels* found : available_kernels()) {
    if (name == found->name) {
      current.store(found, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace kvrag::host

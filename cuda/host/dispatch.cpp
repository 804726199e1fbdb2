#include "dispatch.h"

#include <atomic>

#include "processor.h"

namespace kvrag::host {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found{&kScalar};
#if defined(__x86_64__)
  const Processor processor = this_processor();
  if (processor.avx2) found.push_back(&kAvx2);
  if (processor.avx512) found.push_back(&kAvx512);
  if (processor.avx512_vbmi2) found.push_back(&avx512_vbmi2());
  if (processor.avx512_bf16) found.push_back(&avx512_bf16());
  if (processor.amx_bf16) found.push_back(&amx_bf16());
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

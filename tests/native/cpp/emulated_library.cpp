// The GPU's kernels as a library for Python: launch(kernel, grid, threads, arguments) runs them
// on the host's threads. Every argument is 64 bits wide, as it is on a GPU.
#include "emulated_cuda.h"

// What `extern __shared__` declares.
float tile[32 * 257];

#include <cstring>
#include <utility>

#include "../../../cuda/kernels/rans.cu"
#include "../../../cuda/kernels/reconstruct.cu"

namespace {

template <class T>
T argument_as(u64 value) {
  static_assert(sizeof(T) == 8, "the launcher passes 64 bits");
  T found;
  std::memcpy(&found, &value, sizeof found);
  return found;
}

template <class... Parameters, std::size_t... kPlaces>
void call(void (*kernel)(Parameters...), const u64* arguments, std::index_sequence<kPlaces...>) {
  kernel(argument_as<Parameters>(arguments[kPlaces])...);
}

template <class... Parameters>
int launch_one(void (*kernel)(Parameters...), unsigned grid_x, unsigned grid_y,
               unsigned num_threads, const u64* arguments, u64 num_arguments) {
  if (num_arguments != sizeof...(Parameters)) return 2;
  emulation::launch(grid_x, grid_y, num_threads,
                    [&] { call(kernel, arguments, std::index_sequence_for<Parameters...>{}); });
  return 0;
}

}  // namespace

// 0, 1 for a kernel that does not exist, 2 for another number of arguments than it has.
extern "C" int launch(const char* name, unsigned grid_x, unsigned grid_y, unsigned num_threads,
                      const u64* arguments, u64 num_arguments) {
#define KVRAG_KERNEL(kernel)       \
  if (!std::strcmp(name, #kernel)) \
  return launch_one(kernel, grid_x, grid_y, num_threads, arguments, num_arguments)
  KVRAG_KERNEL(rans_decode);
  KVRAG_KERNEL(rans_encode);
  KVRAG_KERNEL(rans_pack);
  KVRAG_KERNEL(dequantise);
  KVRAG_KERNEL(patch);
  KVRAG_KERNEL(place);
  KVRAG_KERNEL(channels);
  KVRAG_KERNEL(magnitude_contexts);
  KVRAG_KERNEL(refine);
  return 1;
}

// AVX-512 with VBMI2 and BF16 (Zen 4, Sapphire Rapids and later): attention and linear layers in
// pairs of bfloat16.
#define KVRAG_FLOATS 16  // in a register
#define KVRAG_SUMS 8     // lines of attention whose sums fit the registers
#define KVRAG_PAIRS

#include <immintrin.h>

#include "attend_tile.h"
#include "linear_tile.h"
#include "packed_tile.h"

namespace kvrag::host {

// Everything else is the same as for AVX-512 with VBMI2.
const Kernels& avx512_bf16() {
  static const Kernels found = [] {
    Kernels kernels = avx512_vbmi2();
    kernels.name = "avx512bf16";
    kernels.attend = attend_tile;
    kernels.attention_lanes = attention::kLanes;
    kernels.linear = linear_tile;
    kernels.packed = packed_tile;
    kernels.pack = pack_tile;
    return kernels;
  }();
  return found;
}

}  // namespace kvrag::host

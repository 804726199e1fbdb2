// AVX-512 with BF16 and AMX (Sapphire Rapids and later): attention and linear layers in squares of
// bfloat16.
#define KVRAG_FLOATS 16  // in a register
#define KVRAG_SUMS 8     // lines of attention whose sums fit the registers
#define KVRAG_PAIRS
#define KVRAG_SQUARES

#include <immintrin.h>

#include "attend_tile.h"
#include "linear_squares.h"

namespace kvrag::host {

// Everything else is the same as for AVX-512 with BF16.
const Kernels& amx_bf16() {
  static const Kernels found = [] {
    Kernels kernels = avx512_bf16();
    kernels.name = "amxbf16";
    kernels.attend = attend_tile;
    kernels.linear = linear_squares_tile;
    return kernels;
  }();
  return found;
}

}  // namespace kvrag::host

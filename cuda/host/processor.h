// What this processor runs, asked of the processor itself: the compilers' own answer comes from a run-time library,
// and not each of those has one (that of zig says no to everything).
#pragma once

namespace kvrag::host {

struct Processor {
  bool avx2 = false;          // with FMA, BMI 1 and 2, and POPCNT
  bool avx512 = false;        // F, BW, DQ and VL
  bool avx512_vbmi2 = false;  // with VBMI and VNNI
  bool avx512_bf16 = false;
  bool amx_bf16 = false;  // and the operating system lets this process use it
};

// Empty where the processor is not x86-64.
Processor this_processor();

}  // namespace kvrag::host

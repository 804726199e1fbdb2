#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <initializer_list>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace kvrag::host {

#if defined(__x86_64__)

namespace {

// What of the registers the operating system saves.
unsigned saved_state() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool has_all(unsigned bits, std::initializer_list<unsigned> wanted) {
  for (const unsigned bit : wanted) {
    if ((bits >> bit & 1) == 0) return false;
  }
  return true;
}

// The registers of AMX are 8 KiB, which Linux saves only for processes that have asked.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestState = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

// Bits as Intel's manual numbers them: "CPUID", volume 2A.
Processor this_processor() {
  Processor found;
  unsigned a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  constexpr unsigned kFma = 12, kPopcnt = 23, kOsxsave = 27, kAvx = 28;
  if (!has_all(c, {kFma, kPopcnt, kOsxsave, kAvx})) return found;
  const unsigned saved = saved_state();
  constexpr unsigned kXmm = 1, kYmm = 2, kMask = 5, kZmmLow = 6, kZmmHigh = 7;
  if (!has_all(saved, {kXmm, kYmm})) return found;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  constexpr unsigned kBmi1 = 3, kAvx2 = 5, kBmi2 = 8;
  found.avx2 = has_all(b, {kBmi1, kAvx2, kBmi2});
  constexpr unsigned kF = 16, kDq = 17, kBw = 30, kVl = 31;
  found.avx512 = found.avx2 && has_all(saved, {kMask, kZmmLow, kZmmHigh}) &&
                 has_all(b, {kF, kDq, kBw, kVl});
  constexpr unsigned kVbmi = 1, kVbmi2 = 6, kVnni = 11;
  found.avx512_vbmi2 = found.avx512 && has_all(c, {kVbmi, kVbmi2, kVnni});
  constexpr unsigned kAmxBf16 = 22, kAmxTile = 24, kTileShapes = 17, kTileData = 18;
  const bool has_tiles = has_all(d, {kAmxBf16, kAmxTile}) && has_all(saved, {kTileShapes, kTileData});
  constexpr unsigned kBf16 = 5;
  found.avx512_bf16 = found.avx512_vbmi2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 &&
                      has_all(a, {kBf16});
  found.amx_bf16 = found.avx512_bf16 && has_tiles && may_use_tiles();
  return found;
}

#else

Processor this_processor() { return {}; }

#endif

}  // namespace kvrag::host

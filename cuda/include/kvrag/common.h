// Types and macros that host compilers, nvcc and NVRTC agree on.
//
// NVRTC has no standard library, so the headers of this folder include nothing else and define
// their own names for integers. Functions are `static`: the host compiles them once per instruction
// set, and the linker must never use one translation unit's copy for another.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KVRAG_HD __host__ __device__ __forceinline__
#else
#define KVRAG_HD inline
#endif

namespace kvrag {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "a usual machine");

}  // namespace kvrag

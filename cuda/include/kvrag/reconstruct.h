// Reconstructs keys and values from whole numbers: the arithmetic of one element.
//
//     number  = symbol - 128, or a 16-bit value; a patch replaces its point
//     point   = number - sign(number) shrink[row]
//     channel = mean[h, d] + sum over rows r of point[r, t] basis[h, r, d]
//     out     = channel, rotated to its position in the half-split layout, rounded to its type
//
// The basis includes the quantiser's steps. All arithmetic is float32. The order of the sum differs
// between instruction sets and devices, and so do the last bits of the result.
#pragma once

#include "kvrag/common.h"

namespace kvrag {

enum class ElementType : i32 { f32 = 0, bf16 = 1, f16 = 2 };

constexpr i32 kZeroSymbol = 128;

namespace reconstruct {

KVRAG_HD static float point(i32 number, float shrink) {
  const float value = static_cast<float>(number);
  return value > 0.0f ? value - shrink : value < 0.0f ? value + shrink : 0.0f;
}

// The first and second half of a rotated pair of channels.
KVRAG_HD static float rotate_first(float first, float second, float cos, float sin) {
  return first * cos - second * sin;
}

KVRAG_HD static float rotate_second(float first, float second, float cos, float sin) {
  return second * cos + first * sin;
}

KVRAG_HD static u32 bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

// The first of `count` patches, sorted by token, whose token is not below `token`.
KVRAG_HD static u64 first_patch(const u32* patch_tokens, u64 count, u64 token) {
  u64 low = 0;
  u64 high = count;
  while (low < high) {
    const u64 middle = (low + high) / 2;
    if (patch_tokens[middle] < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
KVRAG_HD static u16 to_bf16(float value) {
  const u32 bits = bits_of(value);
  const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const u32 quiet = bits >> 16 | 0x40;
  return static_cast<u16>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

KVRAG_HD static float from_bf16(u16 bfloat16) {
  const u32 bits = u32{bfloat16} << 16;
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// Round to the nearest float16, ties to even; overflow is infinity, NaN stays NaN.
KVRAG_HD static u16 to_f16(float value) {
  const u32 bits = bits_of(value);
  const u32 sign = bits >> 16 & 0x8000;
  const u32 magnitude = bits & 0x7fffffff;
  // Normal results: rebias the exponent by 112, then round the mantissa from 23 to 10 bits. A
  // carry runs into the exponent, where it belongs.
  const u32 normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Below 2^-14, results are multiples of 2^-24: adding 0.5 makes float addition round to those.
  float shifted;
#if defined(__CUDA_ARCH__)
  shifted = __uint_as_float(magnitude);
#else
  __builtin_memcpy(&shifted, &magnitude, sizeof shifted);
#endif
  const u32 subnormal = bits_of(shifted + 0.5f) - 0x3f000000;
  const u32 finite = magnitude < 113u << 23 ? subnormal : normal;
  const u32 infinite = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  // Values from 65520 on round to infinity.
  return static_cast<u16>(sign | (magnitude >= 0x477ff000 ? infinite : finite));
}

// Numbers in planes: a coarse number first, then digits to base 3. The context of a digit is the
// magnitude so far (0, 1, more). A digit is symbol - 128, mirrored if the number is negative.
// Damaged digits can exceed the range of 16 bits; results are clamped to it.
KVRAG_HD static u8 context_of(i16 value) {
  const i32 magnitude = value < 0 ? -value : value;
  return static_cast<u8>(magnitude < 2 ? magnitude : 2);
}

KVRAG_HD static i16 refined(i16 value, u8 symbol) {
  const i32 digit = symbol - kZeroSymbol;
  const i32 finer = 3 * value + (value < 0 ? -digit : digit);
  return static_cast<i16>(finer > 32767 ? 32767 : finer < -32767 ? -32767 : finer);
}

}  // namespace reconstruct
}  // namespace kvrag

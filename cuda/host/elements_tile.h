// What is computed number by number, each in one pass over memory: norms, gates of MLPs, and rotations.
//
// Numbers are rounded to their type where a model's own code rounds them. Only sums over a row have another
// order. Include it after attend_tile.h, which has the exponentials.
#pragma once

#include <cmath>

#include "kernels.h"
#include "kvrag/reconstruct.h"
#include "vectors.h"

namespace kvrag::host {
namespace {  // also for members: the linker must never use another instruction set's
namespace elements {

using attention::Floats;
using attention::Ints;
using attention::kWidth;
typedef u16 Halves __attribute__((vector_size(2 * KVRAG_FLOATS)));
typedef u32 Words __attribute__((vector_size(4 * KVRAG_FLOATS)));

static inline Floats get(const float* from) { return load<Floats>(from); }

static inline Floats get(const u16* from) {
  const Words bits = __builtin_convertvector(load<Halves>(from), Words) << 16;
  Floats values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}

// To the nearest, to even ones from halfway; NaN to a quiet one.
static inline Halves rounded(const Floats& values) {
  Words bits;
  std::memcpy(&bits, &values, sizeof bits);
  const Words nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words kept = values == values ? nearest : 0x7fc0 - Words{};
  return __builtin_convertvector(kept, Halves);
}

static inline void put(float* to, const Floats& values) { store(to, values); }
static inline void put(u16* to, const Floats& values) { store(to, rounded(values)); }

// What a number is once it was stored.
template <class Element>
static inline Floats as_stored(const Floats& values) {
  Element stored[kWidth];
  put(stored, values);
  return get(stored);
}

template <>
inline Floats as_stored<float>(const Floats& values) {
  return values;
}

// Call `body` for vectors of `count` numbers; what is over goes through a whole vector, padded.
template <class Element, u32 kInputs, class Body>
static inline void each_vector(const Element* const (&from)[kInputs], Element* to, u64 count,
                               const Body& body) {
  u64 at = 0;
  for (; at + kWidth <= count; at += kWidth) {
    Floats inputs[kInputs];
    for (u32 i = 0; i < kInputs; ++i) inputs[i] = get(from[i] + at);
    put(to + at, body(inputs));
  }
  if (at == count) return;
  Element rest[kInputs][kWidth] = {}, made[kWidth];
  Floats inputs[kInputs];
  for (u32 i = 0; i < kInputs; ++i) {
    std::memcpy(rest[i], from[i] + at, (count - at) * sizeof(Element));
    inputs[i] = get(rest[i]);
  }
  put(made, body(inputs));
  std::memcpy(to + at, made, (count - at) * sizeof(Element));
}

template <class Element>
static inline float sum_of_squares(const Element* row, u64 count) {
  constexpr u64 kAtOnce = 4;
  Floats sums[kAtOnce] = {};
  u64 at = 0;
  for (; at + kAtOnce * kWidth <= count; at += kAtOnce * kWidth) {
    for (u64 i = 0; i < kAtOnce; ++i) {
      const Floats x = get(row + at + i * kWidth);
      sums[i] += x * x;
    }
  }
  float total = linear::total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; at < count; ++at) {
    const float x = attention::widened(row[at]);
    total += x * x;
  }
  return total;
}

template <class Element>
static inline void norm(const Norm& norm, u64 begin, u64 end) {
  const Element* const weight = static_cast<const Element*>(norm.weight);
  for (u64 row = begin; row < end; ++row) {
    const Element* const in = static_cast<const Element*>(norm.input) + row * norm.width;
    Element* const out = static_cast<Element*>(norm.out) + row * norm.width;
    const float mean = sum_of_squares(in, norm.width) / static_cast<float>(norm.width);
    const float factor = 1.0f / std::sqrt(mean + norm.epsilon);
    const Element* const both[2] = {in, weight};
    if (norm.adds_one) {
      each_vector(both, out, norm.width,
                  [factor](const Floats(&x)[2]) { return x[0] * factor * (x[1] + 1.0f); });
    } else {
      each_vector(both, out, norm.width, [factor](const Floats(&x)[2]) {
        return as_stored<Element>(x[0] * factor) * x[1];
      });
    }
  }
}

constexpr float kLog2OfE = attention::kLog2OfE;

static inline Floats silu(const Floats& number) {
  // Less would be 0 too, but for a division of two infinite numbers.
  const Floats x = attention::at_least(number, -200.0f);
  return x / (1.0f + attention::exp2(attention::at_most(x * -kLog2OfE, 126.0f)));
}

static inline Floats gelu(const Floats& x) {
  constexpr float kSlope = 0.7978845608f, kCube = 0.044715f;  // sqrt(2 / pi)
  const Floats inner = (x + kCube * x * x * x) * kSlope;
  return 0.5f * x * (1.0f + attention::tanh2(inner * (2.0f * kLog2OfE)));
}

template <class Element>
static inline void gate(const Gate& gate, u64 begin, u64 end) {
  const Element* const both[2] = {static_cast<const Element*>(gate.gate) + begin,
                                  static_cast<const Element*>(gate.up) + begin};
  Element* const out = static_cast<Element*>(gate.out) + begin;
  if (gate.is_gelu) {
    each_vector(both, out, end - begin,
                [](const Floats(&x)[2]) { return as_stored<Element>(gelu(x[0])) * x[1]; });
  } else {
    each_vector(both, out, end - begin,
                [](const Floats(&x)[2]) { return as_stored<Element>(silu(x[0])) * x[1]; });
  }
}

template <class Element>
static inline void rotate(const Rotation& rotation, u64 head, u64 begin, u64 end) {
  const u64 half = rotation.num_rotated / 2, rest = rotation.head_dim - 2 * half;
  for (u64 token = begin; token < end; ++token) {
    const i64 at = static_cast<i64>(token);
    const Element* const in = static_cast<const Element*>(rotation.input) +
                              static_cast<i64>(head) * rotation.input_head_stride +
                              at * rotation.input_token_stride;
    Element* const out = static_cast<Element*>(rotation.out) +
                         static_cast<i64>(head) * rotation.out_head_stride +
                         at * rotation.out_token_stride;
    const float* const cos = rotation.cos + at * rotation.angle_stride;
    const float* const sin = rotation.sin + at * rotation.angle_stride;
    u64 i = 0;
    for (; i + kWidth <= half; i += kWidth) {
      const Floats first = get(in + i), second = get(in + half + i);
      const Floats c = get(cos + i), s = get(sin + i);
      put(out + i, first * c - second * s);
      put(out + half + i, second * c + first * s);
    }
    for (; i < half; ++i) {
      const float first = attention::widened(in[i]), second = attention::widened(in[half + i]);
      attention::narrow(reconstruct::rotate_first(first, second, cos[i], sin[i]), out + i);
      attention::narrow(reconstruct::rotate_second(first, second, cos[i], sin[i]), out + half + i);
    }
    std::memcpy(out + 2 * half, in + 2 * half, rest * sizeof(Element));
  }
}

}  // namespace elements

void norm_tile(const Norm& norm, u64 begin, u64 end) noexcept {
  if (norm.type == ElementType::f32) return elements::norm<float>(norm, begin, end);
  elements::norm<u16>(norm, begin, end);
}

void gate_tile(const Gate& gate, u64 begin, u64 end) noexcept {
  if (gate.type == ElementType::f32) return elements::gate<float>(gate, begin, end);
  elements::gate<u16>(gate, begin, end);
}

void rotate_tile(const Rotation& rotation, u64 head, u64 begin, u64 end) noexcept {
  if (rotation.type == ElementType::f32) {
    return elements::rotate<float>(rotation, head, begin, end);
  }
  elements::rotate<u16>(rotation, head, begin, end);
}

}  // namespace
}  // namespace kvrag::host

// Vectors of floats, with the compilers' vector extension, as wide as the instruction set's
// registers. The isa_*.cpp set KVRAG_FLOATS.
#pragma once

#include <cstring>

#include "kvrag/common.h"

namespace kvrag::host {

template <u32 kWidth>
struct VectorOf {
  typedef float Type __attribute__((vector_size(4 * kWidth)));
};

typedef float Floats8 __attribute__((vector_size(32)));
typedef i32 Ints8 __attribute__((vector_size(32)));
typedef u8 Bytes8 __attribute__((vector_size(8)));
typedef i16 Shorts8 __attribute__((vector_size(16)));

template <class Vector, class Element>
static inline Vector load(const Element* from) {
  Vector found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

template <class Vector, class Element>
static inline void store(Element* to, const Vector& value) {
  std::memcpy(to, &value, sizeof value);
}

}  // namespace kvrag::host

// Shared parts of the bindings. They are thin: kvrag/native checks arguments, so the bindings check
// only what memory safety needs.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "kvrag/common.h"

namespace nb = nanobind;

namespace kvrag::host {

template <class T, int kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::device::cpu>;

inline void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

void bind_attention(nb::module_& m);
void bind_elements(nb::module_& m);
void bind_layers(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_reconstruction(nb::module_& m);

}  // namespace kvrag::host

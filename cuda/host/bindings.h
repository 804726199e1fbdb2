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

// New rows of a batch are inside their buffers.
inline void require_places(const Array<const i64, 1>& capacities,
                           const Array<const i64, 1>& places) {
  for (u64 row = 0; row < places.shape(0); ++row) {
    const i64 place = places.data()[row], capacity = capacities.data()[row];
    require(place >= 0 && place < capacity && capacity < 1 << 30, "places are in their buffers");
  }
}

// Throw unless rows are contiguous numbers below `num_keys`, none below the one before it.
inline void require_ascending(const Array<const i64, 1>& rows, u64 num_keys) {
  require(rows.shape(0) <= 1 || rows.stride(0) == 1, "rows are not contiguous");
  i64 before = 0;
  for (u64 row = 0; row < rows.shape(0); ++row) {
    const i64 found = rows.data()[row];
    require(found >= before && found < static_cast<i64>(num_keys), "rows ascend, and are keys");
    before = found;
  }
}

void bind_attention(nb::module_& m);
void bind_elements(nb::module_& m);
void bind_layers(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_reconstruction(nb::module_& m);

}  // namespace kvrag::host

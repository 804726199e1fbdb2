// Bindings of the inverse transform and of refinement.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "bindings.h"
#include "dispatch.h"
#include "placement.h"

namespace kvrag::host {
namespace {

using Floats1 = Array<const float, 1>;
using Floats2 = Array<const float, 2>;
using Floats3 = Array<const float, 3>;
using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using AnyCube = nb::ndarray<nb::ndim<3>, nb::device::cpu>;
using Patches = std::tuple<Array<const u32, 1>, Array<const u32, 1>, Floats1>;
using Tables = std::tuple<Floats2, Floats2>;

template <class A>
bool is_packed(const A& array) {
  if (array.size() == 0) return true;
  i64 expected = 1;
  for (u64 axis = array.ndim(); axis-- > 0;) {
    if (array.shape(axis) > 1 && array.stride(axis) != expected) return false;
    expected *= static_cast<i64>(array.shape(axis));
  }
  return true;
}

// Patches outside the numbers, or out of order, are refused: they come from records.
Numbers make_numbers(const AnyMatrix& matrix, const std::optional<Floats1>& shrink,
                     const std::optional<Patches>& patches) {
  Numbers numbers{};
  if (matrix.dtype() == nb::dtype<u8>()) {
    numbers.symbols = static_cast<const u8*>(matrix.data());
  } else {
    require(matrix.dtype() == nb::dtype<i16>(), "numbers are uint8 or int16");
    numbers.values = static_cast<const i16*>(matrix.data());
  }
  numbers.num_rows = matrix.shape(0);
  require(numbers.num_rows < 1u << 31, "too many rows");
  numbers.row_stride = matrix.stride(0);
  require(matrix.size() == 0 || matrix.shape(1) <= 1 || matrix.stride(1) == 1,
          "tokens are not contiguous");
  if (shrink) {
    require(shrink->shape(0) == numbers.num_rows && is_packed(*shrink), "one shrink a row");
    numbers.shrink = shrink->data();
  }
  if (patches) {
    const auto& [rows, tokens, values] = *patches;
    numbers.num_patches = rows.shape(0);
    require(tokens.shape(0) == rows.shape(0) && values.shape(0) == rows.shape(0) &&
                is_packed(rows) && is_packed(tokens) && is_packed(values),
            "one row, token and value a patch");
    numbers.patch_rows = rows.data();
    numbers.patch_tokens = tokens.data();
    numbers.patch_values = values.data();
    for (u64 i = 0; i < numbers.num_patches; ++i) {
      require(numbers.patch_rows[i] < matrix.shape(0) && numbers.patch_tokens[i] < matrix.shape(1),
              "a patch outside the matrix");
      require(i == 0 || numbers.patch_tokens[i - 1] < numbers.patch_tokens[i] ||
                  (numbers.patch_tokens[i - 1] == numbers.patch_tokens[i] &&
                   numbers.patch_rows[i - 1] < numbers.patch_rows[i]),
              "patches out of order");
    }
  }
  return numbers;
}

Placement make_placement(const AnyMatrix& matrix, AnyCube& out, i32 type, u64 first_token,
                         const std::optional<Tables>& tables) {
  Placement placement{};
  placement.out = out.data();
  placement.type = static_cast<ElementType>(type);
  const nb::dlpack::dtype expected =
      placement.type == ElementType::f32 ? nb::dtype<float>() : nb::dtype<i16>();
  require(type >= 0 && type <= 2 && out.dtype() == expected, "out has another element type");
  placement.head_stride = out.stride(0);
  placement.token_stride = out.stride(1);
  placement.num_heads = out.shape(0);
  placement.num_tokens = out.shape(1);
  placement.head_dim = out.shape(2);
  placement.first_token = first_token;
  require(out.size() == 0 || out.shape(2) <= 1 || out.stride(2) == 1,
          "channels are not contiguous");
  require(first_token <= matrix.shape(1) && out.shape(1) <= matrix.shape(1) - first_token,
          "tokens beyond the matrix");
  if (tables) {
    const auto& [cos, sin] = *tables;
    placement.num_rotated = cos.shape(1);
    require(cos.shape(0) == out.shape(1) && sin.shape(0) == out.shape(1) &&
                sin.shape(1) == cos.shape(1) && cos.shape(1) % 2 == 0 &&
                cos.shape(1) <= out.shape(2),
            "rotation tables of another shape");
    require(cos.size() == 0 || (cos.stride(1) == 1 && sin.stride(1) == 1),
            "rotation tables are not contiguous");
    placement.cos = cos.data();
    placement.sin = sin.data();
    placement.cos_stride = cos.stride(0);
    placement.sin_stride = sin.stride(0);
  }
  return placement;
}

void transform(const AnyMatrix& matrix, const std::optional<Floats1>& shrink,
               const std::optional<Patches>& patches, const Floats3& basis, const Floats2& mean,
               AnyCube out, i32 type, u64 first_token, const std::optional<Tables>& tables,
               u32 threads) {
  const Numbers numbers = make_numbers(matrix, shrink, patches);
  const Placement placement = make_placement(matrix, out, type, first_token, tables);
  require(is_packed(basis) && basis.shape(0) == placement.num_heads &&
              basis.shape(1) == numbers.num_rows && basis.shape(2) == placement.head_dim,
          "basis of another shape");
  require(is_packed(mean) && mean.shape(0) == placement.num_heads &&
              mean.shape(1) == placement.head_dim,
          "mean of another shape");
  const nb::gil_scoped_release release;
  run_transform(numbers, {basis.data(), mean.data()}, placement, threads);
}

void contexts(const Array<const i16, 2>& values, Array<u8, 2> out) {
  require(is_packed(values) && is_packed(out) && out.shape(0) == values.shape(0) &&
              out.shape(1) == values.shape(1),
          "one context a value");
  const nb::gil_scoped_release release;
  kernels().contexts(values.data(), out.data(), values.size());
}

void refine(Array<i16, 2> values, const Array<const u8, 2>& symbols) {
  require(is_packed(values) && is_packed(symbols) && symbols.shape(0) == values.shape(0) &&
              symbols.shape(1) == values.shape(1),
          "one symbol a value");
  const nb::gil_scoped_release release;
  kernels().refine(values.data(), symbols.data(), values.size());
}

}  // namespace

void bind_reconstruction(nb::module_& m) {
  m.def("transform", &transform, nb::arg("numbers").noconvert(), nb::arg("shrink").none(),
        nb::arg("patches").none(), nb::arg("basis").noconvert(), nb::arg("mean").noconvert(),
        nb::arg("out").noconvert(), nb::arg("element_type"), nb::arg("first_token"),
        nb::arg("tables").none(), nb::arg("threads"));
  m.def("contexts", &contexts, nb::arg("values").noconvert(), nb::arg("out").noconvert());
  m.def("refine", &refine, nb::arg("values").noconvert(), nb::arg("symbols").noconvert());
}

}  // namespace kvrag::host

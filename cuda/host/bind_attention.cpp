// Bindings of attention.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>

#include "attention.h"
#include "bindings.h"

namespace kvrag::host {
namespace {

using AnyCube = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Output = nb::ndarray<nb::ndim<3>, nb::device::cpu>;

bool is_contiguous(const AnyCube& cube) {
  return cube.size() == 0 || cube.shape(2) <= 1 || cube.stride(2) == 1;
}

void attend(const AnyCube& query, const AnyCube& key, const AnyCube& value,
            const Array<const i64, 1>& last_keys, Output out, i64 window, float scale,
            float softcap, std::optional<Array<float, 2>> mass, u64 first_counted, u32 threads) {
  Attention attention{};
  attention.type = query.dtype() == nb::dtype<float>() ? ElementType::f32 : ElementType::bf16;
  const nb::dlpack::dtype expected =
      attention.type == ElementType::f32 ? nb::dtype<float>() : nb::dtype<i16>();
  require(query.dtype() == expected && key.dtype() == expected && value.dtype() == expected &&
              out.dtype() == expected,
          "elements are all float32 or all the bits of bfloat16");
  attention.query = query.data();
  attention.key = key.data();
  attention.value = value.data();
  attention.out = out.data();
  attention.query_head_stride = query.stride(0);
  attention.query_row_stride = query.stride(1);
  attention.key_head_stride = key.stride(0);
  attention.key_row_stride = key.stride(1);
  attention.value_head_stride = value.stride(0);
  attention.value_row_stride = value.stride(1);
  attention.num_rows = query.shape(1);
  attention.num_kv_heads = key.shape(0);
  attention.key_dim = key.shape(2);
  attention.value_dim = value.shape(2);
  const u64 num_keys = attention.num_keys = key.shape(1);
  require(key.shape(0) >= 1 && query.shape(0) % key.shape(0) == 0 &&
              query.shape(2) == key.shape(2) && value.shape(0) == key.shape(0) &&
              value.shape(1) == num_keys && num_keys < 1u << 30,
          "queries, keys and values of other shapes");
  attention.group = query.shape(0) / key.shape(0);
  require(out.shape(0) == query.shape(1) && out.shape(1) == query.shape(0) &&
              out.shape(2) == value.shape(2),
          "out of another shape");
  require(is_contiguous(query) && is_contiguous(key) && is_contiguous(value),
          "channels are not contiguous");
  require(out.size() == 0 || ((out.shape(2) <= 1 || out.stride(2) == 1) &&
                              out.stride(1) == static_cast<i64>(out.shape(2)) &&
                              out.stride(0) == static_cast<i64>(out.shape(1) * out.shape(2))),
          "out is not contiguous");
  require(last_keys.shape(0) == attention.num_rows, "one last key a row");
  require_ascending(last_keys, num_keys);
  attention.last_keys = last_keys.data();
  require(window >= 1, "a row sees a key at least");
  attention.window = window;
  attention.scale = scale;
  attention.softcap = softcap;
  attention.first_counted = first_counted;
  if (mass) {
    require(mass->shape(0) == attention.num_kv_heads && mass->shape(1) == num_keys &&
                mass->stride(0) == static_cast<i64>(num_keys) && mass->stride(1) == 1,
            "one mass a key");
    attention.mass = mass->data();
  }
  if (out.size() == 0) {
    if (mass) std::fill_n(mass->data(), mass->size(), 0.0f);
    return;
  }
  const nb::gil_scoped_release release;
  run_attention(attention, threads);
}

// Each row of a batch goes to a buffer of its own, and attends to the keys there. Addresses are
// those of the buffers' keys and values [num_kv_heads, capacity, dim]; places are the new rows in
// them.
void attend_each(const AnyCube& query, const AnyCube& key, const AnyCube& value,
                 const Array<const i64, 1>& key_addresses,
                 const Array<const i64, 1>& value_addresses, const Array<const i64, 1>& capacities,
                 const Array<const i64, 1>& places, Output out, i64 window, float scale,
                 float softcap, u32 threads) {
  const u64 num_rows = query.shape(1), num_kv_heads = key.shape(0), dim = key.shape(2);
  const bool is_float = query.dtype() == nb::dtype<float>();
  const nb::dlpack::dtype expected = is_float ? nb::dtype<float>() : nb::dtype<i16>();
  require(query.dtype() == expected && key.dtype() == expected && value.dtype() == expected &&
              out.dtype() == expected,
          "elements are all float32 or all the bits of bfloat16");
  require(num_kv_heads >= 1 && query.shape(0) % num_kv_heads == 0 && query.shape(2) == dim &&
              key.shape(1) == num_rows && value.shape(0) == num_kv_heads &&
              value.shape(1) == num_rows && value.shape(2) == dim && dim >= 1,
          "queries, keys and values of other shapes");
  require(out.shape(0) == num_rows && out.shape(1) == query.shape(0) && out.shape(2) == dim &&
              is_contiguous(query) && is_contiguous(key) && is_contiguous(value) &&
              (dim <= 1 || out.stride(2) == 1) && out.stride(1) == static_cast<i64>(dim) &&
              out.stride(0) == static_cast<i64>(query.shape(0) * dim),
          "out of another shape, or channels are not contiguous");
  for (const auto* const one : {&key_addresses, &value_addresses, &capacities, &places}) {
    require(one->shape(0) == num_rows && (num_rows <= 1 || one->stride(0) == 1),
            "one address, capacity and place a row");
  }
  require(window >= 1, "a row sees a key at least");
  require_places(capacities, places);
  RowOfEach batch{};
  batch.type = is_float ? ElementType::f32 : ElementType::bf16;
  batch.query = query.data();
  batch.key = key.data();
  batch.value = value.data();
  batch.out = out.data();
  batch.query_head_stride = query.stride(0);
  batch.query_row_stride = query.stride(1);
  batch.key_head_stride = key.stride(0);
  batch.key_row_stride = key.stride(1);
  batch.value_head_stride = value.stride(0);
  batch.value_row_stride = value.stride(1);
  batch.num_rows = num_rows;
  batch.num_kv_heads = num_kv_heads;
  batch.group = query.shape(0) / num_kv_heads;
  batch.dim = dim;
  batch.key_addresses = key_addresses.data();
  batch.value_addresses = value_addresses.data();
  batch.capacities = capacities.data();
  batch.places = places.data();
  batch.window = window;
  batch.scale = scale;
  batch.softcap = softcap;
  if (num_rows == 0) return;
  const nb::gil_scoped_release release;
  run_attention(batch, threads);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attend", &attend, nb::arg("query").noconvert(), nb::arg("key").noconvert(),
        nb::arg("value").noconvert(), nb::arg("last_keys").noconvert(), nb::arg("out").noconvert(),
        nb::arg("window"), nb::arg("scale"), nb::arg("softcap"), nb::arg("mass").none(),
        nb::arg("first_counted"), nb::arg("threads"));
  m.def("attend_each", &attend_each, nb::arg("query").noconvert(), nb::arg("key").noconvert(),
        nb::arg("value").noconvert(), nb::arg("key_addresses").noconvert(),
        nb::arg("value_addresses").noconvert(), nb::arg("capacities").noconvert(),
        nb::arg("places").noconvert(), nb::arg("out").noconvert(), nb::arg("window"),
        nb::arg("scale"), nb::arg("softcap"), nb::arg("threads"));
}

}  // namespace kvrag::host

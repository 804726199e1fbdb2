// Bindings of a decoder's layers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bindings.h"
#include "layers.h"

namespace kvrag::host {
namespace {

const void* at(u64 address) { return reinterpret_cast<const void*>(address); }

using Table = Array<const float, 2>;

Layers::Angles angles(const Table& cos, const Table& sin, u64 num_rows, u64 head_dim) {
  for (const auto* const one : {&cos, &sin}) {
    require(one->shape(0) == num_rows && one->shape(1) == cos.shape(1), "angles for each row");
  }
  require(cos.shape(1) <= head_dim, "angles for no more than a head");
  return {cos.data(), sin.data(), cos.shape(1)};
}

// kvrag/native/linear.py keeps the weights alive, and has checked shapes, types and that arrays are
// contiguous.
void run(const Layers& layers, u64 hidden, const std::vector<Table>& cos,
         const std::vector<Table>& sin, const Array<const i64, 2>& key_addresses,
         const Array<const i64, 2>& value_addresses, const Array<const i64, 1>& capacities,
         const Array<const i64, 1>& places, u32 threads) {
  const u64 num_rows = places.shape(0);
  Layers::Rows rows{reinterpret_cast<void*>(hidden), num_rows, {}, threads};
  require(cos.size() == layers.smallest_heads().size() && sin.size() == cos.size(),
          "angles for each table");
  for (u64 i = 0; i < cos.size(); ++i)
    rows.tables.push_back(angles(cos[i], sin[i], num_rows, layers.smallest_heads()[i]));
  for (const auto* const one : {&key_addresses, &value_addresses}) {
    require(one->shape(0) == layers.num_layers() && one->shape(1) == num_rows,
            "an address for each layer and row");
  }
  for (const auto* const one : {&capacities, &places}) {
    require(one->shape(0) == num_rows, "one capacity and place a row");
  }
  require_places(capacities, places);
  const nb::gil_scoped_release release;
  layers.run(rows,
             {key_addresses.data(), value_addresses.data(), capacities.data(), places.data()});
}

// All tables are the same: a layer uses one.
void run_layer(const Layers& layers, u64 layer, u64 hidden, const Table& cos, const Table& sin,
               u64 keys, u64 values, i64 head_stride, u64 num_keys,
               const Array<const i64, 1>& places, const std::optional<Array<float, 2>>& mass,
               u64 first_counted, u32 threads) {
  const u64 num_rows = places.shape(0);
  require(layer < layers.num_layers(), "one of the layers");
  require(num_keys < 1u << 30, "fewer keys");
  require_ascending(places, num_keys);
  Layers::Rows rows{reinterpret_cast<void*>(hidden), num_rows, {}, threads};
  for (const u64 head_dim : layers.smallest_heads())
    rows.tables.push_back(angles(cos, sin, num_rows, head_dim));
  Layers::Prompt prompt{reinterpret_cast<void*>(keys),
                        reinterpret_cast<void*>(values),
                        head_stride,
                        num_keys,
                        places.data(),
                        nullptr,
                        first_counted};
  if (mass) prompt.mass = mass->data();
  const nb::gil_scoped_release release;
  layers.run_layer(layer, rows, prompt);
}

}  // namespace

void bind_layers(nb::module_& m) {
  nb::class_<Layers>(m, "Layers")
      .def(nb::new_([](bool is_bfloat16, u64 width) {
             return new Layers(is_bfloat16 ? ElementType::bf16 : ElementType::f32, width);
           }),
           nb::arg("is_bfloat16"), nb::arg("width"))
      .def(
          "add_slot", [](Layers& self, u64 width) { return self.add_slot(width); },
          nb::arg("width"))
      .def(
          "linear",
          [](Layers& self, u64 from, u64 to, u64 weight, u64 bias) {
            self.linear(from, to, at(weight), at(bias));
          },
          nb::arg("source"), nb::arg("to"), nb::arg("weight"), nb::arg("bias"))
      .def(
          "int8_linear",
          [](Layers& self, u64 from, u64 to, u64 weight, u64 scale, u64 bias) {
            self.int8_linear(from, to, reinterpret_cast<const u8*>(weight),
                             reinterpret_cast<const float*>(scale),
                             reinterpret_cast<const float*>(bias));
          },
          nb::arg("source"), nb::arg("to"), nb::arg("weight"), nb::arg("scale"), nb::arg("bias"))
      .def(
          "grouped_linear",
          [](Layers& self, u64 from, u64 to, const GroupedWeights& weights) {
            self.grouped_linear(from, to, weights);
          },
          nb::arg("source"), nb::arg("to"), nb::arg("weights"))
      .def(
          "norm",
          [](Layers& self, u64 from, u64 to, u64 weight, u64 width, float epsilon, bool adds_one) {
            self.norm(from, to, at(weight), width, epsilon, adds_one);
          },
          nb::arg("source"), nb::arg("to"), nb::arg("weight"), nb::arg("width"), nb::arg("epsilon"),
          nb::arg("adds_one"))
      .def(
          "gate",
          [](Layers& self, u64 gate, u64 up, u64 to, bool is_gelu) {
            self.gate(gate, up, to, is_gelu);
          },
          nb::arg("gate"), nb::arg("up"), nb::arg("to"), nb::arg("is_gelu"))
      .def(
          "add", [](Layers& self, u64 one, u64 other, u64 to) { self.add(one, other, to); },
          nb::arg("one"), nb::arg("other"), nb::arg("to"))
      .def(
          "rotate",
          [](Layers& self, u64 from, u64 to, u64 table, u64 head_dim) {
            self.rotate(from, to, table, head_dim);
          },
          nb::arg("source"), nb::arg("to"), nb::arg("table"), nb::arg("head_dim"))
      .def(
          "attend",
          [](Layers& self, u64 query, u64 key, u64 value, u64 to, u64 num_kv_heads, u64 head_dim,
             i64 window, float scale, float softcap) {
            self.attend(query, key, value, to, {num_kv_heads, head_dim, window, scale, softcap});
          },
          nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("to"),
          nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("window"), nb::arg("scale"),
          nb::arg("softcap"))
      .def("end_layer", &Layers::end_layer)
      .def("run", &run, nb::arg("hidden"), nb::arg("cos").noconvert(), nb::arg("sin").noconvert(),
           nb::arg("key_addresses").noconvert(), nb::arg("value_addresses").noconvert(),
           nb::arg("capacities").noconvert(), nb::arg("places").noconvert(), nb::arg("threads"))
      .def("run_layer", &run_layer, nb::arg("layer"), nb::arg("hidden"), nb::arg("cos").noconvert(),
           nb::arg("sin").noconvert(), nb::arg("keys"), nb::arg("values"), nb::arg("head_stride"),
           nb::arg("num_keys"), nb::arg("places").noconvert(), nb::arg("mass").none(),
           nb::arg("first_counted"), nb::arg("threads"));
}

}  // namespace kvrag::host

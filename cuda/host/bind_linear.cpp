// Bindings of linear layers.
#include "bindings.h"
#include "linear.h"

namespace kvrag::host {
namespace {

// Called for each layer of each token, so it takes addresses: kvrag/native/linear.py keeps what is
// there alive, and has checked shapes and types.
void linear(u64 input, u64 weight, u64 bias, u64 out, u64 num_rows, u64 num_inputs, u64 num_outputs,
            bool is_bfloat16, u32 threads) {
  const nb::gil_scoped_release release;
  Linear layer{};
  layer.type = is_bfloat16 ? ElementType::bf16 : ElementType::f32;
  layer.input = reinterpret_cast<const void*>(input);
  layer.weight = reinterpret_cast<const void*>(weight);
  layer.bias = reinterpret_cast<const void*>(bias);
  layer.out = reinterpret_cast<void*>(out);
  layer.num_rows = num_rows;
  layer.num_inputs = num_inputs;
  layer.num_outputs = num_outputs;
  run_linear(layer, threads);
}

void int8_linear(u64 input, u64 weight, u64 scale, u64 bias, u64 out, u64 num_rows, u64 num_inputs,
                 u64 num_outputs, bool is_bfloat16, u32 threads) {
  const nb::gil_scoped_release release;
  Int8Linear layer{};
  layer.type = is_bfloat16 ? ElementType::bf16 : ElementType::f32;
  layer.input = reinterpret_cast<const void*>(input);
  layer.weight = reinterpret_cast<const u8*>(weight);
  layer.scale = reinterpret_cast<const float*>(scale);
  layer.bias = reinterpret_cast<const float*>(bias);
  layer.out = reinterpret_cast<void*>(out);
  layer.num_rows = num_rows;
  layer.num_inputs = num_inputs;
  layer.num_outputs = num_outputs;
  run_int8_linear(layer, threads);
}

// The same; `outputs` are those whose weights are wanted as numbers, instead of products.
void grouped_linear(u64 input, const GroupedWeights& weights, u64 out, u64 num_rows,
                    bool is_bfloat16, u32 threads) {
  const nb::gil_scoped_release release;
  GroupedLinear layer = weights.layer;
  layer.type = is_bfloat16 ? ElementType::bf16 : ElementType::f32;
  layer.input = reinterpret_cast<const void*>(input);
  layer.out = reinterpret_cast<void*>(out);
  layer.num_rows = num_rows;
  run_grouped_linear(layer, threads);
}

void grouped_rows(u64 outputs, const GroupedWeights& weights, u64 out, u64 count, bool is_bfloat16,
                  u32 threads) {
  const nb::gil_scoped_release release;
  GroupedLinear layer = weights.layer;
  layer.type = is_bfloat16 ? ElementType::bf16 : ElementType::f32;
  layer.out = reinterpret_cast<void*>(out);
  unpack_grouped(layer, reinterpret_cast<const i64*>(outputs), count, threads);
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("linear", &linear, nb::arg("input"), nb::arg("weight"), nb::arg("bias"), nb::arg("out"),
        nb::arg("num_rows"), nb::arg("num_inputs"), nb::arg("num_outputs"), nb::arg("is_bfloat16"),
        nb::arg("threads"));
  m.def("int8_linear", &int8_linear, nb::arg("input"), nb::arg("weight"), nb::arg("scale"),
        nb::arg("bias"), nb::arg("out"), nb::arg("num_rows"), nb::arg("num_inputs"),
        nb::arg("num_outputs"), nb::arg("is_bfloat16"), nb::arg("threads"));
  nb::class_<GroupedWeights>(m, "GroupedWeights")
      .def(nb::new_([](u64 weight, u64 scale, u64 least, u64 bias, float factor, u64 bits,
                       u64 num_inputs, u64 num_outputs) {
             GroupedLinear layer{};
             layer.weight = reinterpret_cast<const u8*>(weight);
             layer.scale = reinterpret_cast<const u16*>(scale);
             layer.least = reinterpret_cast<const u16*>(least);
             layer.bias = reinterpret_cast<const float*>(bias);
             layer.factor = factor;
             layer.bits = bits;
             layer.num_inputs = num_inputs;
             layer.num_outputs = num_outputs;
             return new GroupedWeights{layer};
           }),
           nb::arg("weight"), nb::arg("scale"), nb::arg("least"), nb::arg("bias"),
           nb::arg("factor"), nb::arg("bits"), nb::arg("num_inputs"), nb::arg("num_outputs"));
  m.def("grouped_linear", &grouped_linear, nb::arg("input"), nb::arg("weights"), nb::arg("out"),
        nb::arg("num_rows"), nb::arg("is_bfloat16"), nb::arg("threads"));
  m.def("grouped_rows", &grouped_rows, nb::arg("outputs"), nb::arg("weights"), nb::arg("out"),
        nb::arg("count"), nb::arg("is_bfloat16"), nb::arg("threads"));
  m.attr("GROUP") = kGroup;
  m.attr("INT8_PANEL") = kInt8Panel;
}

}  // namespace kvrag::host

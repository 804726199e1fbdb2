// Bindings of linear layers.
#include "bindings.h"
#include "linear.h"

namespace kvrag::host {
namespace {

// Called for each layer of each token, so it takes addresses: kvrag/native/linear.py keeps what is
// there alive, and has checked shapes and types.
void linear(u64 input, u64 weight, u64 bias, u64 out, u64 num_rows, u64 num_inputs,
            u64 num_outputs, bool is_bfloat16, u32 threads) {
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

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("linear", &linear, nb::arg("input"), nb::arg("weight"), nb::arg("bias"), nb::arg("out"),
        nb::arg("num_rows"), nb::arg("num_inputs"), nb::arg("num_outputs"),
        nb::arg("is_bfloat16"), nb::arg("threads"));
  m.def("int8_linear", &int8_linear, nb::arg("input"), nb::arg("weight"), nb::arg("scale"),
        nb::arg("bias"), nb::arg("out"), nb::arg("num_rows"), nb::arg("num_inputs"),
        nb::arg("num_outputs"), nb::arg("is_bfloat16"), nb::arg("threads"));
  m.attr("INT8_PANEL") = kInt8Panel;
}

}  // namespace kvrag::host

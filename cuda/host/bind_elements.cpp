// Bindings of norms, gates and rotations.
#include "bindings.h"
#include "elements.h"

namespace kvrag::host {
namespace {

// Called several times for each layer of each token, so they take addresses: kvrag/native/elements.py keeps what is
// there alive, and has checked shapes and types.
void norm(u64 input, u64 weight, u64 out, u64 num_rows, u64 width, float epsilon, bool adds_one,
          bool is_bfloat16, u32 threads) {
  const nb::gil_scoped_release release;
  Norm norm{};
  norm.type = is_bfloat16 ? ElementType::bf16 : ElementType::f32;
  norm.input = reinterpret_cast<const void*>(input);
  norm.weight = reinterpret_cast<const void*>(weight);
  norm.out = reinterpret_cast<void*>(out);
  norm.width = width;
  norm.epsilon = epsilon;
  norm.adds_one = adds_one;
  run_norm(norm, num_rows, threads);
}

void gate(u64 gate, u64 up, u64 out, u64 count, bool is_gelu, bool is_bfloat16, u32 threads) {
  const nb::gil_scoped_release release;
  Gate both{};
  both.type = is_bfloat16 ? ElementType::bf16 : ElementType::f32;
  both.gate = reinterpret_cast<const void*>(gate);
  both.up = reinterpret_cast<const void*>(up);
  both.out = reinterpret_cast<void*>(out);
  both.is_gelu = is_gelu;
  run_gate(both, count, threads);
}

void rotate(u64 input, u64 out, u64 cos, u64 sin, i64 input_head_stride, i64 input_token_stride,
            i64 out_head_stride, i64 out_token_stride, i64 angle_stride, u64 num_heads,
            u64 num_tokens, u64 head_dim, u64 num_rotated, bool is_bfloat16) {
  const nb::gil_scoped_release release;
  Rotation rotation{};
  rotation.type = is_bfloat16 ? ElementType::bf16 : ElementType::f32;
  rotation.input = reinterpret_cast<const void*>(input);
  rotation.out = reinterpret_cast<void*>(out);
  rotation.cos = reinterpret_cast<const float*>(cos);
  rotation.sin = reinterpret_cast<const float*>(sin);
  rotation.input_head_stride = input_head_stride;
  rotation.input_token_stride = input_token_stride;
  rotation.out_head_stride = out_head_stride;
  rotation.out_token_stride = out_token_stride;
  rotation.angle_stride = angle_stride;
  rotation.head_dim = head_dim;
  rotation.num_rotated = num_rotated;
  run_rotation(rotation, num_heads, num_tokens);
}

}  // namespace

void bind_elements(nb::module_& m) {
  m.def("norm", &norm, nb::arg("input"), nb::arg("weight"), nb::arg("out"), nb::arg("num_rows"),
        nb::arg("width"), nb::arg("epsilon"), nb::arg("adds_one"), nb::arg("is_bfloat16"),
        nb::arg("threads"));
  m.def("gate", &gate, nb::arg("gate"), nb::arg("up"), nb::arg("out"), nb::arg("count"),
        nb::arg("is_gelu"), nb::arg("is_bfloat16"), nb::arg("threads"));
  m.def("rotate", &rotate, nb::arg("input"), nb::arg("out"), nb::arg("cos"), nb::arg("sin"),
        nb::arg("input_head_stride"), nb::arg("input_token_stride"), nb::arg("out_head_stride"),
        nb::arg("out_token_stride"), nb::arg("angle_stride"), nb::arg("num_heads"),
        nb::arg("num_tokens"), nb::arg("head_dim"), nb::arg("num_rotated"),
        nb::arg("is_bfloat16"));
}

}  // namespace kvrag::host

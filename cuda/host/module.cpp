// kvrag._native: the module, and its bindings of the entropy coder.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "code_length.h"
#include "dispatch.h"
#include "model.h"
#include "payload.h"

namespace kvrag::host {
namespace {

using Bytes = Array<const u8, 2>;
using Classes = Array<const u16, 1>;
using Contexts = std::optional<Bytes>;

template <class Symbol, class Matrix>
Rows<Symbol> make_rows(const Model& model, Matrix& symbols, const Classes& classes,
                       const Contexts& contexts) {
  Rows<Symbol> rows{symbols.data(),   symbols.stride(0), classes.data(), nullptr, 0,
                    symbols.shape(0), symbols.shape(1)};
  require(symbols.size() == 0 || rows.num_tokens <= 1 || symbols.stride(1) == 1,
          "tokens are not contiguous");
  require(classes.shape(0) == rows.num_rows, "one class a row");
  require(rows.num_rows <= 1 || classes.stride(0) == 1, "classes are not contiguous");
  if (contexts) {
    rows.contexts = contexts->data();
    rows.context_stride = contexts->stride(0);
    require(contexts->shape(0) == rows.num_rows && contexts->shape(1) == rows.num_tokens,
            "one context a symbol");
    require(contexts->size() == 0 || rows.num_tokens <= 1 || contexts->stride(1) == 1,
            "contexts are not contiguous");
  }
  const Greatest greatest = greatest_classes(rows.classes, rows.contexts, rows.context_stride,
                                             rows.num_rows, rows.num_tokens);
  require(greatest.table < model.num_classes || rows.num_rows == 0,
          "a class the model does not have");
  rows.most_context = greatest.context;
  return rows;
}

Model* make_model(const Array<const u16, 2>& frequencies) {
  const u64 num_classes = frequencies.shape(0);
  const u64 num_symbols = frequencies.shape(1);
  require(num_symbols >= 1 && num_symbols <= rans::kMaxSymbols, "1 to 256 symbols");
  require(frequencies.stride(1) == 1 && frequencies.stride(0) == static_cast<i64>(num_symbols),
          "frequencies are not contiguous");
  for (u64 row = 0; row < num_classes; ++row) {
    u32 sum = 0;
    for (u64 i = 0; i < num_symbols; ++i) sum += frequencies.data()[row * num_symbols + i];
    require(sum == rans::kNumSlots, "frequencies do not sum to 4096");
  }
  return new Model(frequencies.data(), num_classes, static_cast<u32>(num_symbols));
}

nb::object encode(const Model& model, const Bytes& symbols, const Classes& classes,
                  const Contexts& contexts, u64 num_streams, u32 threads) {
  const auto rows = make_rows<const u8>(model, symbols, classes, contexts);
  require(num_streams >= 1 && num_streams <= (rows.num_rows == 0 ? 1 : rows.num_rows), "streams");
  std::vector<u8> payload;
  {
    const nb::gil_scoped_release release;
    payload = encode_payload(rows, model.encode(), num_streams, threads);
  }
  if (payload.empty()) return nb::none();
  return nb::bytes(payload.data(), payload.size());
}

using Job = std::tuple<const Model*, Array<const u8, 1>, Classes, Array<u8, 2>, Contexts>;

std::vector<std::tuple<i32, u64, u64, u64>> decode(const std::vector<Job>& jobs, u32 threads) {
  std::vector<DecodeJob> prepared;
  for (const auto& [model, payload, classes, out, contexts] : jobs) {
    require(model != nullptr, "a job without a model");
    require(payload.shape(0) <= 1 || payload.stride(0) == 1, "payload is not contiguous");
    prepared.push_back({payload.data(), payload.shape(0), model->tables(),
                        make_rows<u8>(*model, out, classes, contexts)});
  }
  std::vector<Failure> failures;
  {
    const nb::gil_scoped_release release;
    failures = decode_payloads(prepared, threads);
  }
  std::vector<std::tuple<i32, u64, u64, u64>> found;
  for (const Failure& failure : failures) {
    found.emplace_back(static_cast<i32>(failure.damage), failure.stream, failure.expected,
                       failure.found);
  }
  return found;
}

double ideal_bits(const Model& model, const Bytes& symbols, const Classes& classes,
                  const Contexts& contexts) {
  const auto rows = make_rows<const u8>(model, symbols, classes, contexts);
  const nb::gil_scoped_release release;
  return code_length(model, rows);
}

std::tuple<i64, i64> first_uncodable(const Model& model, const Bytes& symbols,
                                     const Classes& classes, const Contexts& contexts) {
  const auto rows = make_rows<const u8>(model, symbols, classes, contexts);
  const nb::gil_scoped_release release;
  return uncodable_place(model, rows);
}

}  // namespace

NB_MODULE(_native, m) {
  // A traceback that outlives the interpreter keeps objects alive. That is not a leak of ours.
  nb::set_leak_warnings(false);
  m.doc() = "kvrag's compiled kernels; use kvrag.native, which checks what it passes on.";
  nb::class_<Model>(m, "Model")
      .def(nb::new_(&make_model), nb::arg("frequencies").noconvert())
      .def_ro("num_classes", &Model::num_classes)
      .def_ro("num_symbols", &Model::num_symbols);
  m.def("encode", &encode, nb::arg("model"), nb::arg("symbols").noconvert(),
        nb::arg("classes").noconvert(), nb::arg("contexts").none(), nb::arg("num_streams"),
        nb::arg("threads"));
  m.def("decode", &decode, nb::arg("jobs"), nb::arg("threads"));
  m.def("ideal_bits", &ideal_bits, nb::arg("model"), nb::arg("symbols").noconvert(),
        nb::arg("classes").noconvert(), nb::arg("contexts").none());
  m.def("first_uncodable", &first_uncodable, nb::arg("model"), nb::arg("symbols").noconvert(),
        nb::arg("classes").noconvert(), nb::arg("contexts").none());
  bind_attention(m);
  bind_elements(m);
  bind_layers(m);
  bind_linear(m);
  bind_reconstruction(m);
  m.def("instruction_set", [] { return std::string(kernels().name); });
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const Kernels* found : available_kernels()) names.emplace_back(found->name);
    return names;
  });
  m.def("use_instruction_set", &use_kernels, nb::arg("name"));
}

}  // namespace kvrag::host

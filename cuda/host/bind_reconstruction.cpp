// Bindings of the inverse transform and of refinement.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
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

// What Python holds of a basis: all but rows.
struct Bands {
  Packed packed;
  // Keep the memory of `packed`.
  Array<const u8, 2> widths;
  Array<const i8, 1> basis;
  Array<const i32, 1> starts;
  Floats1 mean, scales, powers;
  Array<const u8, 1> levels;
};

bool are_levels(const Array<const u8, 1>& levels) {
  const u8* const end = levels.data() + levels.size();
  return is_packed(levels) && levels.size() == 128 &&
         std::all_of(levels.data(), end, [](u8 level) { return level < 128; });
}

u64 width_of(const u8* widths, u64 count) {
  u64 bytes = 0;
  for (u64 i = 0; i < count; ++i) {
    require(widths[i] <= kPackedBits, "a number has 0 to 6 bits");
    bytes += widths[i];
  }
  return bytes;
}

Bands* make_bands(Array<const u8, 2> widths, Array<const i8, 1> basis, Array<const i32, 1> starts,
                  Floats1 mean, Floats1 scales, Floats1 powers, Array<const u8, 1> levels,
                  u64 band_channels) {
  Packed packed{};
  packed.num_bands = widths.shape(0);
  packed.num_numbers = widths.shape(1) * kPackedGroup;
  packed.band_channels = band_channels;
  const u64 padded = packed_panels(band_channels) * kPackedPanel;
  require(packed.num_bands > 0 && packed.num_numbers > 0 && packed.num_numbers <= 1 << 14 &&
              band_channels > 0 && band_channels <= 1 << 14 && packed.num_bands <= 1 << 16,
          "bands of numbers");
  require(is_packed(widths) && is_packed(basis) && is_packed(starts) && is_packed(mean) &&
              is_packed(scales) && is_packed(powers) && are_levels(levels),
          "contiguous arrays");
  require(basis.size() == packed.num_bands * padded * packed.num_numbers &&
              starts.size() == packed.num_bands * padded && mean.size() == starts.size() &&
              scales.size() == packed.num_bands && powers.size() == 256,
          "arrays of the bands' shape");
  packed.widths = widths.data();
  for (u64 band = 0; band < packed.num_bands; ++band) {
    const u64 bytes = 1 + width_of(packed.widths + band * widths.shape(1), widths.shape(1));
    require(band == 0 || bytes == packed.band_bytes, "bands have as many bytes");
    packed.band_bytes = bytes;
  }
  packed.basis = basis.data();
  packed.starts = starts.data();
  packed.mean = mean.data();
  packed.scales = scales.data();
  packed.powers = powers.data();
  packed.levels = levels.data();
  return new Bands{packed, widths, basis, starts, mean, scales, powers, levels};
}

// Keys, turned, and values of tokens of a chunk; either may be left out. Python has checked what
// the addresses hold: arrays that it would have to wrap take longer than decoding a short chunk.
void place_packed(const Array<const u8, 1>& rows, u64 first_byte, u64 row_bytes, u64 first_token,
                  u64 num_tokens, const Bands& keys, u64 keys_at, i64 keys_head_stride,
                  i64 keys_token_stride, const Bands* values, u64 values_at, i64 values_head_stride,
                  i64 values_token_stride, u64 num_heads, u64 head_dim, i32 type, u64 cos_at,
                  u64 sin_at, i64 angle_stride, u64 num_rotated, u32 threads) {
  PackedPart parts[2] = {{keys.packed, {}}, {}};
  u64 num_parts = 1, used = keys.packed.num_bands * keys.packed.band_bytes;
  Placement& placement = parts[0].placement;
  placement.out = reinterpret_cast<void*>(keys_at);
  placement.type = static_cast<ElementType>(type);
  require(type >= 0 && type <= 2 && num_rotated % 2 == 0 && num_rotated <= head_dim, "a placement");
  placement.head_stride = keys_head_stride;
  placement.token_stride = keys_token_stride;
  placement.num_heads = num_heads;
  placement.head_dim = head_dim;
  placement.first_token = first_token;
  placement.num_tokens = num_tokens;
  parts[0].packed.rows = rows.data() + first_byte;
  if (values != nullptr) {
    parts[1] = {values->packed, placement};
    parts[1].placement.out = reinterpret_cast<void*>(values_at);
    parts[1].placement.head_stride = values_head_stride;
    parts[1].placement.token_stride = values_token_stride;
    parts[1].packed.rows = parts[0].packed.rows + used;
    used += values->packed.num_bands * values->packed.band_bytes;
    num_parts = 2;
  }
  placement.cos = reinterpret_cast<const float*>(cos_at);
  placement.sin = reinterpret_cast<const float*>(sin_at);
  placement.cos_stride = placement.sin_stride = angle_stride;
  placement.num_rotated = num_rotated;
  for (u64 part = 0; part < num_parts; ++part) {
    Packed& packed = parts[part].packed;
    packed.row_bytes = row_bytes;
    require(num_heads * head_dim == packed.num_bands * packed.band_channels,
            "heads are the bands' channels");
  }
  const u64 last = first_token + num_tokens;
  require(is_packed(rows) && row_bytes < 1 << 24 && first_token < 1u << 31 &&
              num_tokens < 1u << 31 && used <= row_bytes && first_byte < 1u << 31 &&
              (last == 0 || first_byte + (last - 1) * row_bytes + used + 8 <= rows.size()),
          "rows, and 8 bytes behind them");
  const nb::gil_scoped_release release;
  run_packed(parts, num_parts, threads);
}

void pack(const Floats3& numbers, const Array<const u8, 2>& widths, const Floats2& weights,
          const Floats1& powers, const Array<const u8, 2>& nearest, const Floats2& meanings,
          Array<u8, 2> rows, Array<float, 2> lost) {
  const u64 num_bands = numbers.shape(0), num_tokens = numbers.shape(1), groups = widths.shape(1);
  Packing packing{};
  packing.num_numbers = groups * kPackedGroup;
  require(is_packed(numbers) && is_packed(widths) && is_packed(powers) && powers.size() == 256 &&
              widths.shape(0) == num_bands && numbers.shape(2) == packing.num_numbers &&
              rows.shape(0) == num_tokens && is_packed(lost) && lost.shape(0) == num_bands &&
              lost.shape(1) == num_tokens && is_packed(weights) && weights.shape(0) == num_bands &&
              weights.shape(1) == groups && is_packed(nearest) && is_packed(meanings) &&
              nearest.shape(0) == kPackedBits + 1 && nearest.shape(1) == 256 &&
              meanings.shape(0) == nearest.shape(0) && meanings.shape(1) == 256 &&
              packing.num_numbers <= 1 << 14 &&
              rows.shape(1) == num_bands + width_of(widths.data(), widths.size()) &&
              (rows.size() == 0 || (rows.stride(1) == 1 && rows.stride(0) >= 0)),
          "a row for each token's numbers");
  for (u64 i = 0; i < nearest.size(); ++i) {
    require(nearest.data()[i] >> (i / 256) == 0 && std::fabs(meanings.data()[i]) <= kPackedMiddle,
            "numbers of their widths, and what they stand for");
  }
  packing.powers = powers.data();
  packing.nearest = nearest.data();
  packing.meanings = meanings.data();
  packing.rows = rows.data();
  packing.row_bytes = static_cast<u64>(rows.stride(0));
  const nb::gil_scoped_release release;
  for (u64 band = 0; band < num_bands; ++band) {
    packing.numbers = numbers.data() + band * num_tokens * packing.num_numbers;
    packing.widths = widths.data() + band * groups;
    packing.weights = weights.data() + band * groups;
    packing.lost = lost.data() + band * num_tokens;
    run_packing(packing, num_tokens);
    packing.rows += 1 + width_of(packing.widths, groups);
  }
}

}  // namespace

void bind_reconstruction(nb::module_& m) {
  m.def("transform", &transform, nb::arg("numbers").noconvert(), nb::arg("shrink").none(),
        nb::arg("patches").none(), nb::arg("basis").noconvert(), nb::arg("mean").noconvert(),
        nb::arg("out").noconvert(), nb::arg("element_type"), nb::arg("first_token"),
        nb::arg("tables").none(), nb::arg("threads"));
  nb::class_<Bands>(m, "Bands")
      .def(nb::new_(&make_bands), nb::arg("widths").noconvert(), nb::arg("basis").noconvert(),
           nb::arg("starts").noconvert(), nb::arg("mean").noconvert(),
           nb::arg("scales").noconvert(), nb::arg("powers").noconvert(),
           nb::arg("levels").noconvert(), nb::arg("band_channels"));
  m.def("place_packed", &place_packed, nb::arg("rows").noconvert(), nb::arg("first_byte"),
        nb::arg("row_bytes"), nb::arg("first_token"), nb::arg("num_tokens"), nb::arg("keys"),
        nb::arg("keys_at"), nb::arg("keys_head_stride"), nb::arg("keys_token_stride"),
        nb::arg("values").none(), nb::arg("values_at"), nb::arg("values_head_stride"),
        nb::arg("values_token_stride"), nb::arg("num_heads"), nb::arg("head_dim"), nb::arg("type"),
        nb::arg("cos_at"), nb::arg("sin_at"), nb::arg("angle_stride"), nb::arg("num_rotated"),
        nb::arg("threads"));
  m.def("pack", &pack, nb::arg("numbers").noconvert(), nb::arg("widths").noconvert(),
        nb::arg("weights").noconvert(), nb::arg("powers").noconvert(),
        nb::arg("nearest").noconvert(), nb::arg("meanings").noconvert(),
        nb::arg("rows").noconvert(), nb::arg("lost").noconvert());
  m.def("contexts", &contexts, nb::arg("values").noconvert(), nb::arg("out").noconvert());
  m.def("refine", &refine, nb::arg("values").noconvert(), nb::arg("symbols").noconvert());
}

}  // namespace kvrag::host

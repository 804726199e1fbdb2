// The kernels without Python, for sanitizers and for processors that are emulated.
//
//     driver [rounds] [seed]
//
// Round trips, damaged payloads, reconstructions, attention, layers and their elements with every
// instruction set there is, in buffers of exactly the size the kernels may touch. Prints a hash of
// all payloads, which must be the same on every machine.
#include <thread>

#include "elements.h"
#include "input.h"
#include "layers.h"
#include "linear.h"

using namespace kvrag;
using namespace kvrag::host;

namespace {

Failure decode(const Matrix& m, const Model& model, const std::vector<u8>& payload, u8* out) {
  const auto copy = exactly<u8>(payload.size());
  if (!payload.empty()) std::memcpy(copy.get(), payload.data(), payload.size());
  const std::vector<DecodeJob> jobs{{copy.get(), payload.size(), model.tables(), m.rows(out)}};
  return decode_payloads(jobs, 1).front();
}

// Whatever the bytes say: an answer, and no access outside the buffers.
void damage(const Matrix& m, const Model& model, std::vector<u8> payload, u8* out) {
  switch (below(4)) {
    case 0:
      payload.resize(below(payload.size() + 1));
      break;
    case 1:
      for (u64 i = below(8) + 1; i-- > 0;) payload[below(payload.size())] ^= 1u << below(8);
      break;
    case 2:
      for (u64 i = 4 + 4 * below(8); i < payload.size(); ++i) payload[i] = engine() & 0xff;
      break;
    default:
      payload.resize(payload.size() + 1 + below(200));
      break;
  }
  decode(m, model, payload, out);
}

u64 code(u64 hash) {
  const u64 num_rows = below(12);
  const Matrix m = random_matrix(num_rows, below(4) == 0 ? below(400) : below(70));
  const Model model = make_model(m);
  const u64 num_streams = 1 + below(m.num_rows == 0 ? 1 : m.num_rows);
  std::vector<u8> first;
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const auto payload =
        encode_payload(m.rows<const u8>(m.symbols.get()), model.encode(), num_streams, 1);
    if (first.empty()) first = payload;
    check(payload == first, "another payload than the first instruction set's");
    const u64 size = m.num_rows * m.num_tokens;
    const auto out = exactly<u8>(size);
    check(decode(m, model, payload, out.get()).damage == Damage::none, "refused its own payload");
    check(size == 0 || std::memcmp(out.get(), m.symbols.get(), size) == 0, "other symbols");
    // The same damage for each, and the same numbers afterwards however many there are.
    const std::mt19937_64 before = engine;
    for (int i = 0; i < 4; ++i) damage(m, model, payload, out.get());
    engine = before;
  }
  for (const u8 byte : first) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

void reconstruct_once() {
  Reconstruction input;
  const u64 size = input.size();
  std::vector<float> first;
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    for (const ElementType type : {ElementType::bf16, ElementType::f16, ElementType::f32}) {
      const auto out = exactly<u8>(size * (type == ElementType::f32 ? 4 : 2));
      input.run(out.get(), type);
      if (type != ElementType::f32) continue;
      std::vector<float> written(size);
      std::memcpy(written.data(), out.get(), size * 4);
      if (first.empty()) first = written;
      check_close(written.data(), first.data(), size, "another sum than the first's");
    }
    const u64 count = input.num_rows * input.num_tokens;
    auto finer = filled<i16>(count, [] { return i16{-7}; });
    const auto context = exactly<u8>(count);
    kernels().contexts(finer.get(), context.get(), count);
    kernels().refine(finer.get(), input.symbols.get(), count);
  }
}

// Packed rows lose what they told, read from memory of exactly their size.
void packed_once() {
  const u64 num_heads = 1 + below(3), head_dim = 2 * (1 + below(40)), tokens = 1 + below(40);
  const u64 channels = num_heads * head_dim, groups = (channels + 7) / 8, numbers = 8 * groups;
  const u64 panels = packed_panels(channels), padded = panels * kPackedPanel;
  const auto widths = filled<u8>(groups, [] { return static_cast<u8>(below(kPackedBits + 1)); });
  u64 row_bytes = 1;
  for (u64 group = 0; group < groups; ++group) row_bytes += widths[group];
  // Evenly spaced levels, and a basis that changes nothing: channels are what numbers stand for.
  const auto levels = exactly<u8>(128);
  const auto nearest = exactly<u8>((kPackedBits + 1) * 256);
  const auto meanings = exactly<float>((kPackedBits + 1) * 256);
  for (u64 width = 1; width <= kPackedBits; ++width) {
    const u64 count = u64{1} << width;
    for (u64 u = 0; u < count; ++u) levels[count + u] = static_cast<u8>(127 * u / (count - 1));
    for (u64 place = 0, u = 0; place < 256; ++place) {
      while (u + 1 < count && levels[count + u] + levels[count + u + 1] <= place) ++u;
      nearest[256 * width + place] = static_cast<u8>(u);
      meanings[256 * width + place] = static_cast<float>(2 * levels[count + u] - kPackedMiddle);
    }
  }
  const auto basis = exactly<i8>(numbers * padded);
  const auto starts = exactly<i32>(padded);
  for (u64 i = 0; i < channels; ++i) {
    if (widths[i / 8] == 0) continue;
    basis[((i / kPackedPanel * numbers + i / 4 * 4) * kPackedPanel) + i % kPackedPanel * 4 +
          i % 4] = 1;
    starts[i] = -kPackedMiddle;
  }
  const auto mean = exactly<float>(padded);
  const float scale = 1.0f;
  const auto powers = exactly<float>(256);
  for (u64 i = 0; i < 256; ++i) powers[i] = std::exp2((static_cast<float>(i) - 128) / 8);
  const auto weights = filled<float>(groups, [] { return 1.0f; });
  const auto given = filled<float>(tokens * numbers, [] { return 100 * uniform(); });
  const auto cos = filled<float>(tokens * head_dim, [] { return 1.0f; });
  const auto sin = exactly<float>(tokens * head_dim);
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const auto rows = exactly<u8>(tokens * row_bytes + 8);
    const auto lost = exactly<float>(tokens);
    run_packing({given.get(), numbers, widths.get(), weights.get(), powers.get(), nearest.get(),
                 meanings.get(), rows.get(), row_bytes, lost.get()},
                tokens);
    const u64 first = below(tokens), count = tokens - first;
    const auto out = exactly<float>(count * channels);
    const auto rounded = exactly<u16>(count * channels);
    PackedPart parts[2];
    parts[0] = {
        {rows.get(), row_bytes, 1, channels, row_bytes, numbers, widths.get(), basis.get(),
         starts.get(), mean.get(), &scale, powers.get(), levels.get()},
        {out.get(), ElementType::f32, static_cast<i64>(head_dim), static_cast<i64>(channels),
         num_heads, head_dim, first, count, cos.get(), sin.get(), static_cast<i64>(head_dim),
         static_cast<i64>(head_dim), below(2) == 0 ? head_dim : 0}};
    parts[1] = parts[0];
    parts[1].placement.out = rounded.get();
    parts[1].placement.type = ElementType::bf16;
    run_packed(parts, 2, 1 + static_cast<u32>(below(3)));
    for (u64 token = 0; token < count; ++token) {
      float squares = 0;
      for (u64 i = 0; i < channels; ++i) {
        const float wrong = out[token * channels + i] - given[(first + token) * numbers + i];
        squares += wrong * wrong;
        const u32 bits = u32{rounded[token * channels + i]} << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        check(std::fabs(value - out[token * channels + i]) <=
                  std::fabs(out[token * channels + i]) / 128,
              "bfloat16 is far off");
      }
      check(squares <= lost[first + token] * 1.01f + 0.1f, "packed rows lose more than was told");
    }
  }
}

void attend_once() {
  Attending input;
  std::vector<float> first;
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const auto out = exactly<float>(input.size());
    input.run(out.get(), 1 + static_cast<u32>(below(3)));
    input.check_mass();
    if (first.empty()) first.assign(out.get(), out.get() + input.size());
    check_close(out.get(), first.data(), input.size(), "another attention than the first's");
    const auto rounded = exactly<u16>(input.size());
    input.run(rounded.get(), 1);
    for (u64 i = 0; i < input.size(); ++i) {
      const u32 bits = u32{rounded[i]} << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      check(std::fabs(value - first[i]) <= 0.1f, "bfloat16 is far off");
    }
  }
}

void layer_once() {
  // Wide ones are shared among threads.
  const u64 rows = 1 + below(below(3) == 0 ? 70 : 17), outputs = 1 + below(80);
  const u64 inputs = 1 + below(below(8) == 0 ? 4000 : 150);
  const auto input = filled<float>(rows * inputs, uniform);
  const auto weight = filled<float>(outputs * inputs, uniform);
  const auto bias = filled<float>(outputs, uniform);
  const auto halves = [](const std::unique_ptr<float[]>& floats, u64 count) {
    auto found = exactly<u16>(count);
    for (u64 i = 0; i < count; ++i) found[i] = reconstruct::to_bf16(floats[i]);
    return found;
  };
  const auto input16 = halves(input, rows * inputs), weight16 = halves(weight, outputs * inputs);
  const auto bias16 = halves(bias, outputs);
  const bool has_bias = below(2) == 0;
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const auto out = exactly<float>(rows * outputs);
    const auto rounded = exactly<u16>(rows * outputs);
    const u32 threads = 1 + static_cast<u32>(below(3));
    run_linear({ElementType::f32, input.get(), weight.get(), has_bias ? bias.get() : nullptr,
                out.get(), rows, inputs, outputs},
               threads);
    run_linear({ElementType::bf16, input16.get(), weight16.get(), has_bias ? bias16.get() : nullptr,
                rounded.get(), rows, inputs, outputs},
               threads);
    for (u64 row = 0; row < rows; ++row) {
      for (u64 o = 0; o < outputs; ++o) {
        const float width = static_cast<float>(inputs);
        float sum = has_bias ? bias[o] : 0.0f;
        float rough = has_bias ? reconstruct::from_bf16(bias16[o]) : 0.0f;
        for (u64 i = 0; i < inputs; ++i) {
          const u64 x = row * inputs + i, w = o * inputs + i;
          sum += input[x] * weight[w];
          rough += reconstruct::from_bf16(input16[x]) * reconstruct::from_bf16(weight16[w]);
        }
        const u64 place = row * outputs + o;
        const float slack = 1e-3f + 1e-5f * width;
        check(std::fabs(out[place] - sum) <= slack, "another output");
        const float value = reconstruct::from_bf16(rounded[place]);
        check(std::fabs(value - rough) <= slack + std::fabs(rough) / 256, "bfloat16 is far off");
      }
    }
  }
}

// The first instruction set's results count as right; rows and tokens end where the memory does.
void elements_once() {
  const u64 rows = 1 + below(9), width = 1 + below(100), size = rows * width;
  const u64 half = below(width / 2 + 1);
  const auto input = filled<float>(size, uniform), other = filled<float>(size, uniform);
  const auto weight = filled<float>(width, uniform);
  const auto cos = filled<float>(rows * half, uniform), sin = filled<float>(rows * half, uniform);
  const auto halves = [](const std::unique_ptr<float[]>& floats, u64 count) {
    auto found = exactly<u16>(count);
    for (u64 i = 0; i < count; ++i) found[i] = reconstruct::to_bf16(floats[i]);
    return found;
  };
  const auto input16 = halves(input, size), other16 = halves(other, size);
  const auto weight16 = halves(weight, width);
  const bool flag = below(2) == 0;
  const u32 threads = 1 + static_cast<u32>(below(3));
  std::vector<std::vector<float>> first(3);
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const auto run = [&](u64 which, auto is_wide, auto* out) {
      constexpr bool kWide = decltype(is_wide)::value;
      const ElementType type = kWide ? ElementType::f32 : ElementType::bf16;
      const auto of = [](const auto& wide, const auto& narrow) {
        return kWide ? static_cast<const void*>(wide.get()) : narrow.get();
      };
      if (which == 0) {
        const Norm norm{type, of(input, input16), of(weight, weight16), out, width, 1e-3f, flag};
        run_norm(norm, rows, threads);
      } else if (which == 1) {
        run_gate({type, of(input, input16), of(other, other16), out, flag}, size, threads);
      } else {
        const i64 stride = static_cast<i64>(width);
        run_rotation({type, of(input, input16), out, stride, stride, stride, stride, width,
                      2 * half, cos.get(), sin.get(), static_cast<i64>(half)},
                     1, rows);
      }
    };
    for (u64 which = 0; which < 3; ++which) {
      const auto out = exactly<float>(size);
      run(which, std::true_type(), out.get());
      if (first[which].empty()) first[which].assign(out.get(), out.get() + size);
      check_close(out.get(), first[which].data(), size, "another element than the first's");
      const auto rounded = exactly<u16>(size);
      run(which, std::false_type(), rounded.get());
      for (u64 i = 0; i < size; ++i) {
        const u32 bits = u32{rounded[i]} << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        check(std::fabs(value - first[which][i]) <= 0.2f, "bfloat16 is far off");
      }
    }
  }
}

void int8_once() {
  const u64 rows = 1 + below(110), inputs = 1 + below(150), outputs = 1 + below(140);
  const u64 stride = int8_stride(inputs), panels = (outputs + kInt8Panel - 1) / kInt8Panel;
  const auto input = filled<float>(rows * inputs, uniform);
  const auto scale = filled<float>(panels * kInt8Panel, uniform);
  const auto bias = filled<float>(panels * kInt8Panel, uniform);
  const auto weight = exactly<u8>(panels * kInt8Panel * stride);
  for (u64 i = 0; i < panels * kInt8Panel * stride; ++i) weight[i] = 1 + below(255);
  auto input16 = exactly<u16>(rows * inputs);
  for (u64 i = 0; i < rows * inputs; ++i) input16[i] = reconstruct::to_bf16(input[i]);
  if (below(4) == 0) input[below(rows * inputs)] = INFINITY;
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const auto out = exactly<float>(rows * outputs);
    const auto rounded = exactly<u16>(rows * outputs);
    const u32 threads = 1 + static_cast<u32>(below(3));
    Int8Linear layer{ElementType::f32, input.get(), weight.get(), scale.get(), bias.get(),
                     out.get(),        rows,        inputs,       outputs};
    run_int8_linear(layer, threads);
    layer.type = ElementType::bf16;
    layer.input = input16.get();
    layer.out = rounded.get();
    run_int8_linear(layer, threads);
    for (u64 row = 0; row < rows; ++row) {
      float peak = 0;
      for (u64 i = 0; i < inputs; ++i) peak = std::fmax(peak, std::fabs(input[row * inputs + i]));
      for (u64 o = 0; o < outputs; ++o) {
        const u8* const quads = weight.get() + o / kInt8Panel * kInt8Panel * stride;
        float sum = 0, bound = 0;
        for (u64 i = 0; i < inputs; ++i) {
          const u64 place = (i / 4 * kInt8Panel + o % kInt8Panel) * 4 + i % 4;
          const float factor = static_cast<float>(quads[place] - 128) * scale[o];
          sum += input[row * inputs + i] * factor;
          bound += std::fabs(factor) * peak / 250;
        }
        const float value = out[row * outputs + o];
        check(peak == INFINITY ? std::isnan(value)
                               : std::fabs(value - sum - bias[o]) <= bound + 1e-3f,
              "another output in 8 bits");
      }
    }
  }
}

// Weights by groups, of every width: against what the same bytes say one by one.
void grouped_once() {
  constexpr u64 kWidths[] = {4, 5, 6, 8};
  const u64 rows = 1 + below(110), inputs = 1 + below(150), outputs = 1 + below(140);
  const u64 bits = kWidths[below(4)], panels = (outputs + kInt8Panel - 1) / kInt8Panel;
  const u64 places = panels * grouped_groups(inputs), scales = places * kInt8Panel;
  // Half precision, up to 0.03 and of either sign.
  const auto half = [] { return static_cast<u16>(below(2) << 15 | (8 << 10) | below(2048)); };
  const auto weight = filled<u8>(places * grouped_bytes(bits), [&] {
    return static_cast<u8>(bits == 8 ? 1 + below(255) : below(256));
  });
  const auto scale = filled<u16>(scales * (bits == 6 ? 2 : 1), half);
  const bool has_least = bits < 6 && below(2) == 0;
  const auto least = filled<u16>(has_least ? scales : 0, half);
  const auto bias = filled<float>(panels * kInt8Panel, uniform);
  const auto input = filled<float>(rows * inputs, uniform);
  if (below(4) == 0) input[below(rows * inputs)] = INFINITY;
  const auto input16 = exactly<u16>(rows * inputs);
  for (u64 i = 0; i < rows * inputs; ++i) input16[i] = reconstruct::to_bf16(input[i]);
  const auto each = filled<i64>(outputs, [number = i64{0}]() mutable { return number++; });
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const u32 threads = 1 + static_cast<u32>(below(3));
    const auto unpacked = exactly<float>(outputs * inputs), out = exactly<float>(rows * outputs);
    const auto rounded = exactly<u16>(rows * outputs);
    GroupedLinear layer{ElementType::f32,
                        input.get(),
                        weight.get(),
                        scale.get(),
                        has_least ? least.get() : nullptr,
                        bias.get(),
                        0.5f,
                        unpacked.get(),
                        bits,
                        rows,
                        inputs,
                        outputs};
    unpack_grouped(layer, each.get(), outputs, threads);
    layer.out = out.get();
    run_grouped_linear(layer, threads);
    layer.type = ElementType::bf16;
    layer.input = input16.get();
    layer.out = rounded.get();
    run_grouped_linear(layer, threads);
    for (u64 row = 0; row < rows; ++row) {
      const float* const from = input.get() + row * inputs;
      float peak = 0;
      for (u64 i = 0; i < inputs; ++i) peak = std::fmax(peak, std::fabs(from[i]));
      for (u64 o = 0; o < outputs; ++o) {
        float sum = bias[o], bound = 1e-3f;
        for (u64 i = 0; i < inputs; ++i) {
          sum += from[i] * unpacked[o * inputs + i];
          bound += std::fabs(unpacked[o * inputs + i]) * peak / 250;
        }
        const u64 place = row * outputs + o;
        const float value = out[place], near = reconstruct::from_bf16(rounded[place]);
        if (peak == INFINITY) {
          check(std::isnan(value) && std::isnan(near), "numbers from a row that has none");
        } else {
          check(std::fabs(value - sum) <= bound, "another output by groups");
          check(std::fabs(near - sum) <= 2 * bound + std::fabs(sum) / 128, "bfloat16 is far off");
        }
      }
    }
  }
}

// A decoder's layer for a row of each prompt or for rows of one: the same as by the first
// instruction set, and what rows of one prompt write.
void layers_once() {
  const bool is_one = below(2) == 0;
  const u64 rows = 1 + below(17), kv_heads = 1 + below(2), group = 1 + below(4),
            dim = 2 * (1 + below(20));
  const u64 asked = kv_heads * group * dim, given = kv_heads * dim, wide = 1 + below(70);
  const bool is_int8 = below(4) == 0;
  const auto type = below(2) == 0 ? ElementType::f32 : ElementType::bf16;
  const u64 size = type == ElementType::f32 ? 4 : 2;
  const auto random = [&](u64 count) {
    auto found = exactly<char>(count * size);
    for (u64 i = 0; i < count; ++i) {
      // Larger ones make sums that cancel, where roundings of bfloat16 add up to a tenth.
      const float value = 0.15f * uniform();
      const u16 half = reconstruct::to_bf16(value);
      std::memcpy(found.get() + i * size,
                  type == ElementType::f32 ? static_cast<const void*>(&value) : &half, size);
    }
    return found;
  };
  const auto to_query = random(asked * asked), to_key = random(given * asked),
             to_value = random(given * asked);
  const auto up = random(wide * asked), down = random(asked * wide), bias = random(wide),
             weight = random(asked);
  const u64 panels = (asked + kInt8Panel - 1) / kInt8Panel;
  auto bytes = exactly<u8>(panels * kInt8Panel * int8_stride(wide));
  for (u64 i = 0; i < panels * kInt8Panel * int8_stride(wide); ++i)
    bytes[i] = static_cast<u8>(1 + below(255));
  const auto scale = filled<float>(panels * kInt8Panel, [] { return 0.001f; });
  const auto none = filled<float>(panels * kInt8Panel, [] { return 0.0f; });
  const auto cos = filled<float>(rows * dim, uniform), sin = filled<float>(rows * dim, uniform);
  const i64 capacity = static_cast<i64>((is_one ? rows : 1) + below(50));
  std::vector<std::unique_ptr<char[]>> buffers;
  std::vector<i64> keys, values, places, capacities(rows, capacity);
  const u64 held = kv_heads * static_cast<u64>(capacity) * dim;
  for (u64 i = 0; i < 2 * rows; ++i) {
    buffers.push_back(random(held));
    (i < rows ? keys : values).push_back(reinterpret_cast<i64>(buffers.back().get()));
    if (i < rows) places.push_back(static_cast<i64>(below(static_cast<u64>(capacity))));
  }
  if (is_one) {
    // Ascending, with some rows between them.
    i64 spare = capacity - static_cast<i64>(rows), before = 0;
    for (u64 i = 0; i < rows; ++i) {
      const i64 left_out = static_cast<i64>(below(static_cast<u64>(spare) + 1));
      spare -= left_out;
      places[i] = before + left_out;
      before = places[i] + 1;
    }
  }
  Layers layers(type, asked);
  const u64 normed = layers.add_slot(asked), query = layers.add_slot(asked),
            turned = layers.add_slot(asked);
  const u64 key = layers.add_slot(given), turned_key = layers.add_slot(given),
            value = layers.add_slot(given);
  const u64 gate = layers.add_slot(wide), gated = layers.add_slot(wide);
  layers.norm(0, normed, weight.get(), asked, 1e-5f, below(2) == 0);
  layers.linear(normed, query, to_query.get(), nullptr);
  layers.linear(normed, key, to_key.get(), nullptr);
  layers.linear(normed, value, to_value.get(), nullptr);
  layers.rotate(query, turned, 0, dim);
  layers.rotate(key, turned_key, 0, dim);
  layers.attend(
      turned, turned_key, value, query,
      {kv_heads, dim, static_cast<i64>(1 + below(60)), 0.1f, below(2) == 0 ? 0.0f : 3.0f});
  layers.add(0, query, 0);
  layers.linear(0, gate, up.get(), bias.get());
  layers.gate(gate, gate, gated, below(2) == 0);
  if (is_int8) {
    layers.int8_linear(gated, normed, bytes.get(), scale.get(), none.get());
  } else {
    layers.linear(gated, normed, down.get(), nullptr);
  }
  layers.add(0, normed, 0);
  layers.end_layer();
  const u64 num_keys = static_cast<u64>(places.back()) + 1;
  const bool takes_mass = below(2) == 0;
  const auto input = random(rows * asked);
  std::vector<float> first;
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const auto hidden = exactly<char>(rows * asked * size);
    std::memcpy(hidden.get(), input.get(), rows * asked * size);
    const Layers::Rows given_rows{
        hidden.get(), rows, {{cos.get(), sin.get(), dim}}, 1 + static_cast<u32>(below(3))};
    if (is_one) {
      const auto mass = exactly<float>(kv_heads * num_keys);
      layers.run_layer(0, given_rows,
                       {buffers[0].get(), buffers[rows].get(), capacity * static_cast<i64>(dim),
                        num_keys, places.data(), takes_mass ? mass.get() : nullptr, rows / 2});
      float sum = 0;
      for (u64 i = 0; takes_mass && i < kv_heads * num_keys; ++i) sum += mass[i];
      const float counted = static_cast<float>(kv_heads * group * (rows - rows / 2));
      check(!takes_mass || std::fabs(sum - counted) <= 1e-3f * counted, "weights that sum to 1");
    } else {
      layers.run(given_rows, {keys.data(), values.data(), capacities.data(), places.data()});
    }
    for (u64 i = 0; i < rows * asked; ++i) {
      float number = 0;
      u16 half = 0;
      if (type == ElementType::f32) {
        std::memcpy(&number, hidden.get() + i * size, size);
      } else {
        std::memcpy(&half, hidden.get() + i * size, size);
        number = reconstruct::from_bf16(half);
      }
      if (first.size() < rows * asked) {
        first.push_back(number);
      } else {
        // Roundings of bfloat16 and of 8 bits add up to 0.03 in thousands of rounds.
        const float most = type == ElementType::f32 && !is_int8 ? 1e-4f : 0.1f;
        check(std::fabs(number - first[i]) <= most * (1.0f + std::fabs(first[i])), "other layers");
      }
    }
  }
}

// Several callers at a time, each with helpers from the pool.
void share_the_pool() {
  const Matrix m = random_matrix(200, 1000);
  const Model model = make_model(m);
  const Rows<const u8> rows = m.rows<const u8>(m.symbols.get());
  const auto payload = encode_payload(rows, model.encode(), 20, 1);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        check(encode_payload(rows, model.encode(), 20, 3) == payload, "threads change a payload");
        const auto out = exactly<u8>(m.num_rows * m.num_tokens);
        const std::vector<DecodeJob> jobs{
            {payload.data(), payload.size(), model.tables(), m.rows(out.get())}};
        check(decode_payloads(jobs, 3).front().damage == Damage::none, "threads find damage");
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main(int argc, char** argv) {
  const u64 rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300;
  engine.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  u64 hash = 14695981039346656037u;
  for (u64 round = 0; round < rounds; ++round) {
    hash = code(hash);
    reconstruct_once();
    packed_once();
    attend_once();
    layer_once();
    elements_once();
    int8_once();
    grouped_once();
    layers_once();
  }
  share_the_pool();
  std::string names;
  for (const Kernels* found : available_kernels()) names += std::string(" ") + found->name;
  std::printf("%llu rounds,%s: payloads %016llx\n", rounds, names.c_str(), hash);
}

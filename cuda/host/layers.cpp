#include "layers.h"

#include <algorithm>
#include <memory>

#include "attention.h"
#include "elements.h"
#include "kvrag/reconstruct.h"
#include "linear.h"
#include "team.h"

namespace kvrag::host {
namespace {

constexpr u64 kAlignment = 64;
// With fewer numbers, a second thread costs more than it saves.
constexpr u64 kNumbersPerThread = 1 << 16;

u64 size_of(ElementType type) { return type == ElementType::f32 ? sizeof(float) : sizeof(u16); }

// Call `body` for parts of the rows, [begin, end), on several threads if there are many numbers.
template <class Body>
void share_rows(const Layers::Rows& rows, u64 width, const Body& body) {
  const u64 parts = std::clamp<u64>(rows.num_rows * width / kNumbersPerThread, 1, rows.threads);
  const u64 share = (rows.num_rows + parts - 1) / parts;
  team_for(parts, parts == 1 ? 1 : rows.threads, [&](u64 part) {
    const u64 begin = std::min(part * share, rows.num_rows);
    body(begin, std::min(begin + share, rows.num_rows));
  });
}

}  // namespace

Layers::Layers(ElementType type, u64 width) : type_(type), widths_{width} {}

u64 Layers::add_slot(u64 width) {
  widths_.push_back(width);
  return widths_.size() - 1;
}

void Layers::linear(u64 from, u64 to, const void* weight, const void* bias) {
  const u64 num_inputs = width(from), num_outputs = width(to);
  operations_.push_back([=, type = type_](const Run& run) {
    run_linear({type, run.slots[from], weight, bias, run.slots[to], run.rows.num_rows, num_inputs,
                num_outputs},
               run.rows.threads);
  });
}

void Layers::int8_linear(u64 from, u64 to, const u8* weight, const float* scale,
                         const float* bias) {
  const u64 num_inputs = width(from), num_outputs = width(to);
  operations_.push_back([=, type = type_](const Run& run) {
    run_int8_linear({type, run.slots[from], weight, scale, bias, run.slots[to], run.rows.num_rows,
                     num_inputs, num_outputs},
                    run.rows.threads);
  });
}

void Layers::grouped_linear(u64 from, u64 to, const GroupedWeights& weights) {
  operations_.push_back([=, type = type_, layer = weights.layer](const Run& run) {
    GroupedLinear one = layer;
    one.type = type;
    one.input = run.slots[from];
    one.out = run.slots[to];
    one.num_rows = run.rows.num_rows;
    run_grouped_linear(one, run.rows.threads);
  });
}

void Layers::norm(u64 from, u64 to, const void* weight, u64 width, float epsilon, bool adds_one) {
  const u64 each = this->width(from) / width;
  operations_.push_back([=, type = type_](const Run& run) {
    run_norm({type, run.slots[from], weight, run.slots[to], width, epsilon, adds_one},
             run.rows.num_rows * each, run.rows.threads);
  });
}

void Layers::gate(u64 gate, u64 up, u64 to, bool is_gelu) {
  const u64 count = width(gate);
  operations_.push_back([=, type = type_](const Run& run) {
    run_gate({type, run.slots[gate], run.slots[up], run.slots[to], is_gelu},
             run.rows.num_rows * count, run.rows.threads);
  });
}

void Layers::add(u64 one, u64 other, u64 to) {
  const u64 count = width(one);
  operations_.push_back([=, type = type_](const Run& run) {
    share_rows(run.rows, count, [&](u64 begin, u64 end) {
      begin *= count, end *= count;
      if (type == ElementType::f32) {
        const float* const a = static_cast<const float*>(run.slots[one]);
        const float* const b = static_cast<const float*>(run.slots[other]);
        float* const out = static_cast<float*>(run.slots[to]);
        for (u64 i = begin; i < end; ++i) out[i] = a[i] + b[i];
      } else {
        const u16* const a = static_cast<const u16*>(run.slots[one]);
        const u16* const b = static_cast<const u16*>(run.slots[other]);
        u16* const out = static_cast<u16*>(run.slots[to]);
        for (u64 i = begin; i < end; ++i) {
          out[i] =
              reconstruct::to_bf16(reconstruct::from_bf16(a[i]) + reconstruct::from_bf16(b[i]));
        }
      }
    });
  });
}

void Layers::rotate(u64 from, u64 to, u64 table, u64 head_dim) {
  if (smallest_heads_.size() <= table) smallest_heads_.resize(table + 1, head_dim);
  smallest_heads_[table] = std::min(smallest_heads_[table], head_dim);
  const i64 all = static_cast<i64>(width(from)), stride = static_cast<i64>(head_dim);
  operations_.push_back([=, type = type_](const Run& run) {
    const Angles& angles = run.rows.tables[table];
    Rotation rotation{};
    rotation.type = type;
    rotation.input_head_stride = rotation.out_head_stride = stride;
    rotation.input_token_stride = rotation.out_token_stride = all;
    rotation.head_dim = head_dim;
    rotation.num_rotated = angles.num_rotated;
    rotation.angle_stride = static_cast<i64>(angles.num_rotated);
    share_rows(run.rows, static_cast<u64>(all), [&](u64 begin, u64 end) {
      Rotation part = rotation;
      const u64 bytes = begin * static_cast<u64>(all) * size_of(type);
      part.input = static_cast<const char*>(run.slots[from]) + bytes;
      part.out = static_cast<char*>(run.slots[to]) + bytes;
      part.cos = angles.cos + begin * angles.num_rotated;
      part.sin = angles.sin + begin * angles.num_rotated;
      run_rotation(part, static_cast<u64>(all / stride), end - begin);
    });
  });
}

void Layers::attend(u64 query, u64 key, u64 value, u64 to, const Attending& attending) {
  NewRows given{};
  given.type = type_;
  given.query_head_stride = given.key_head_stride = given.value_head_stride =
      static_cast<i64>(attending.head_dim);
  given.query_row_stride = static_cast<i64>(width(query));
  given.key_row_stride = given.value_row_stride = static_cast<i64>(width(key));
  given.num_kv_heads = attending.num_kv_heads;
  given.group = width(query) / width(key);
  given.dim = attending.head_dim;
  given.window = attending.window;
  given.scale = attending.scale;
  given.softcap = attending.softcap;
  operations_.push_back([=, layer = num_layers()](const Run& run) {
    NewRows rows = given;
    rows.query = run.slots[query];
    rows.key = run.slots[key];
    rows.value = run.slots[value];
    rows.out = run.slots[to];
    rows.num_rows = run.rows.num_rows;
    if (run.buffers != nullptr) {
      const Buffers& buffers = *run.buffers;
      rows.places = buffers.places;
      const u64 before = layer * rows.num_rows;
      run_attention(RowOfEach{rows, buffers.key_addresses + before,
                              buffers.value_addresses + before, buffers.capacities},
                    run.rows.threads);
    } else {
      const Prompt& prompt = *run.prompt;
      rows.places = prompt.places;
      run_attention(RowsOfOne{rows, prompt.keys, prompt.values, prompt.head_stride, prompt.num_keys,
                              prompt.mass, prompt.first_counted},
                    run.rows.threads);
    }
  });
}

void Layers::end_layer() { ends_.push_back(operations_.size()); }

void Layers::run(const Rows& rows, const Buffers& buffers) const {
  run(rows, &buffers, nullptr, 0, ends_.empty() ? 0 : ends_.back());
}

void Layers::run_layer(u64 layer, const Rows& rows, const Prompt& prompt) const {
  run(rows, nullptr, &prompt, layer == 0 ? 0 : ends_.at(layer - 1), ends_.at(layer));
}

void Layers::run(const Rows& rows, const Buffers* buffers, const Prompt* prompt, u64 begin,
                 u64 end) const {
  Run run{rows, buffers, prompt, {rows.hidden}};
  std::vector<u64> offsets;
  u64 total = 0;
  for (u64 slot = 1; slot < widths_.size(); ++slot) {
    offsets.push_back(total);
    const u64 bytes = rows.num_rows * widths_[slot] * size_of(type_);
    total += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  const std::unique_ptr<char[]> memory(new char[total + kAlignment]);
  const u64 address = reinterpret_cast<u64>(memory.get());
  char* const base = memory.get() + (-address & (kAlignment - 1));
  for (const u64 offset : offsets) run.slots.push_back(base + offset);
  for (u64 i = begin; i < end; ++i) operations_[i](run);
}

}  // namespace kvrag::host

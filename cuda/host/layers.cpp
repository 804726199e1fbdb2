#include "layers.h"

#include <algorithm>

#include "attention.h"
#include "elements.h"
#include "kvrag/reconstruct.h"
#include "linear.h"

namespace kvrag::host {
namespace {

constexpr u64 kAlignment = 64;

u64 size_of(ElementType type) { return type == ElementType::f32 ? sizeof(float) : sizeof(u16); }

}  // namespace

Layers::Layers(ElementType type, u64 width) : type_(type), widths_{width} {}

u64 Layers::add_slot(u64 width) {
  widths_.push_back(width);
  return widths_.size() - 1;
}

void Layers::linear(u64 from, u64 to, const void* weight, const void* bias) {
  const u64 num_inputs = width(from), num_outputs = width(to);
  operations_.push_back([=, type = type_](const Run& run) {
    run_linear({type, run.slots[from], weight, bias, run.slots[to], run.batch.num_rows, num_inputs,
                num_outputs},
               run.batch.threads);
  });
}

void Layers::int8_linear(u64 from, u64 to, const u8* weight, const float* scale,
                         const float* bias) {
  const u64 num_inputs = width(from), num_outputs = width(to);
  operations_.push_back([=, type = type_](const Run& run) {
    run_int8_linear({type, run.slots[from], weight, scale, bias, run.slots[to], run.batch.num_rows,
                     num_inputs, num_outputs},
                    run.batch.threads);
  });
}

void Layers::norm(u64 from, u64 to, const void* weight, u64 width, float epsilon, bool adds_one) {
  const u64 each = this->width(from) / width;
  operations_.push_back([=, type = type_](const Run& run) {
    run_norm({type, run.slots[from], weight, run.slots[to], width, epsilon, adds_one},
             run.batch.num_rows * each, run.batch.threads);
  });
}

void Layers::gate(u64 gate, u64 up, u64 to, bool is_gelu) {
  const u64 count = width(gate);
  operations_.push_back([=, type = type_](const Run& run) {
    run_gate({type, run.slots[gate], run.slots[up], run.slots[to], is_gelu},
             run.batch.num_rows * count, run.batch.threads);
  });
}

void Layers::add(u64 one, u64 other, u64 to) {
  const u64 count = width(one);
  operations_.push_back([=, type = type_](const Run& run) {
    const u64 all = run.batch.num_rows * count;
    if (type == ElementType::f32) {
      const float* const a = static_cast<const float*>(run.slots[one]);
      const float* const b = static_cast<const float*>(run.slots[other]);
      float* const out = static_cast<float*>(run.slots[to]);
      for (u64 i = 0; i < all; ++i) out[i] = a[i] + b[i];
    } else {
      const u16* const a = static_cast<const u16*>(run.slots[one]);
      const u16* const b = static_cast<const u16*>(run.slots[other]);
      u16* const out = static_cast<u16*>(run.slots[to]);
      for (u64 i = 0; i < all; ++i)
        out[i] = reconstruct::to_bf16(reconstruct::from_bf16(a[i]) + reconstruct::from_bf16(b[i]));
    }
  });
}

void Layers::rotate(u64 from, u64 to, u64 table, u64 head_dim) {
  if (smallest_heads_.size() <= table) smallest_heads_.resize(table + 1, head_dim);
  smallest_heads_[table] = std::min(smallest_heads_[table], head_dim);
  const i64 all = static_cast<i64>(width(from)), stride = static_cast<i64>(head_dim);
  operations_.push_back([=, type = type_](const Run& run) {
    const Angles& angles = run.batch.tables[table];
    Rotation rotation{};
    rotation.type = type;
    rotation.input = run.slots[from];
    rotation.out = run.slots[to];
    rotation.input_head_stride = rotation.out_head_stride = stride;
    rotation.input_token_stride = rotation.out_token_stride = all;
    rotation.head_dim = head_dim;
    rotation.num_rotated = angles.num_rotated;
    rotation.cos = angles.cos;
    rotation.sin = angles.sin;
    rotation.angle_stride = static_cast<i64>(angles.num_rotated);
    run_rotation(rotation, static_cast<u64>(all / stride), run.batch.num_rows);
  });
}

void Layers::attend(u64 query, u64 key, u64 value, u64 to, const Attending& attending) {
  num_layers_ = std::max(num_layers_, attending.layer + 1);
  RowOfEach given{};
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
  operations_.push_back([=, layer = attending.layer](const Run& run) {
    const Batch& batch = run.batch;
    RowOfEach rows = given;
    rows.query = run.slots[query];
    rows.key = run.slots[key];
    rows.value = run.slots[value];
    rows.out = run.slots[to];
    rows.num_rows = batch.num_rows;
    rows.key_addresses = batch.key_addresses + layer * batch.num_rows;
    rows.value_addresses = batch.value_addresses + layer * batch.num_rows;
    rows.capacities = batch.capacities;
    rows.places = batch.places;
    run_attention(rows, batch.threads);
  });
}

void Layers::run(const Batch& batch) const {
  Run run{batch, {batch.hidden}};
  std::vector<u64> offsets;
  u64 total = 0;
  for (u64 slot = 1; slot < widths_.size(); ++slot) {
    offsets.push_back(total);
    const u64 bytes = batch.num_rows * widths_[slot] * size_of(type_);
    total += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  std::vector<char> memory(total + kAlignment);
  const u64 address = reinterpret_cast<u64>(memory.data());
  char* const base = memory.data() + (-address & (kAlignment - 1));
  for (const u64 offset : offsets) run.slots.push_back(base + offset);
  for (const auto& operation : operations_) operation(run);
}

}  // namespace kvrag::host

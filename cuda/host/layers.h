// A decoder's layers over one row of each prompt of a batch, in one call: only kernels run between
// them.
#pragma once

#include <functional>
#include <vector>

#include "kernels.h"

namespace kvrag::host {

// What the layers compute is a list of operations, in order, on slots: rows of numbers of one type,
// f32 or bf16. Slot 0 is the layers' input and output. Weights are not copied.
class Layers {
 public:
  explicit Layers(ElementType type, u64 width);

  // Return the number of a new slot; rows are `width` numbers long.
  u64 add_slot(u64 width);

  // Operations; each reads slots and writes `to`, which is none of them unless an operation goes
  // number by number.
  void linear(u64 from, u64 to, const void* weight, const void* bias);
  void int8_linear(u64 from, u64 to, const u8* weight, const float* scale, const float* bias);
  void norm(u64 from, u64 to, const void* weight, u64 width, float epsilon, bool adds_one);
  void gate(u64 gate, u64 up, u64 to, bool is_gelu);
  void add(u64 one, u64 other, u64 to);
  void rotate(u64 from, u64 to, u64 table, u64 head_dim);
  struct Attending {
    u64 layer;
    u64 num_kv_heads;
    u64 head_dim;
    i64 window;
    float scale;
    float softcap;
  };
  void attend(u64 query, u64 key, u64 value, u64 to, const Attending& attending);

  // Angles of the rows: [num_rows, num_rotated] each, of which the first half counts.
  struct Angles {
    const float* cos;
    const float* sin;
    u64 num_rotated;
  };
  struct Batch {
    void* hidden;  // [num_rows, width of slot 0]
    u64 num_rows;
    std::vector<Angles> tables;
    const i64* key_addresses;  // [layers, num_rows]; see `RowOfEach`
    const i64* value_addresses;
    const i64* capacities;  // [num_rows]
    const i64* places;
    u32 threads;
  };
  void run(const Batch& batch) const;

  // For each table, the smallest heads that it rotates.
  const std::vector<u64>& smallest_heads() const { return smallest_heads_; }
  u64 num_layers() const { return num_layers_; }
  u64 width(u64 slot) const { return widths_.at(slot); }

 private:
  struct Run {
    const Batch& batch;
    std::vector<void*> slots;
  };

  ElementType type_;
  std::vector<u64> widths_;
  std::vector<std::function<void(const Run&)>> operations_;
  std::vector<u64> smallest_heads_;
  u64 num_layers_ = 0;
};

}  // namespace kvrag::host

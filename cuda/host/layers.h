// A decoder's layers over few rows: all layers over one row of each prompt of a batch, or one layer
// over rows of one prompt. Only kernels run between the operations.
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
  void grouped_linear(u64 from, u64 to, const GroupedWeights& weights);
  void norm(u64 from, u64 to, const void* weight, u64 width, float epsilon, bool adds_one);
  void gate(u64 gate, u64 up, u64 to, bool is_gelu);
  void add(u64 one, u64 other, u64 to);
  void rotate(u64 from, u64 to, u64 table, u64 head_dim);
  struct Attending {
    u64 num_kv_heads;
    u64 head_dim;
    i64 window;
    float scale;
    float softcap;
  };
  void attend(u64 query, u64 key, u64 value, u64 to, const Attending& attending);

  // What was added since the last layer's end is a layer. Others are never computed.
  void end_layer();

  // Angles of the rows: [num_rows, num_rotated] each, of which the first half counts.
  struct Angles {
    const float* cos;
    const float* sin;
    u64 num_rotated;
  };
  struct Rows {
    void* hidden;  // [num_rows, width of slot 0]
    u64 num_rows;
    std::vector<Angles> tables;
    u32 threads;
  };
  // Where a row of each prompt goes, in each layer; see `RowOfEach`.
  struct Buffers {
    const i64* key_addresses;  // [layers, num_rows]
    const i64* value_addresses;
    const i64* capacities;  // [num_rows]
    const i64* places;
  };
  void run(const Rows& rows, const Buffers& buffers) const;

  // Where rows of one prompt go, in one layer: they see the keys up to their places. Heads are
  // `head_stride` elements apart.
  struct Prompt {
    void* keys;  // [num_kv_heads, num_keys, dim]
    void* values;
    i64 head_stride;
    u64 num_keys;
    const i64* places;  // [num_rows], ascending
    float* mass;        // see `Attention`
    u64 first_counted;
  };
  void run_layer(u64 layer, const Rows& rows, const Prompt& prompt) const;

  // For each table, the smallest heads that it rotates.
  const std::vector<u64>& smallest_heads() const { return smallest_heads_; }
  u64 num_layers() const { return ends_.size(); }
  u64 width(u64 slot) const { return widths_.at(slot); }

 private:
  // One of `buffers` and `prompt` is given.
  struct Run {
    const Rows& rows;
    const Buffers* buffers;
    const Prompt* prompt;
    std::vector<void*> slots;
  };
  void run(const Rows& rows, const Buffers* buffers, const Prompt* prompt, u64 begin,
           u64 end) const;

  ElementType type_;
  std::vector<u64> widths_;
  std::vector<std::function<void(const Run&)>> operations_;
  std::vector<u64> smallest_heads_;
  std::vector<u64> ends_;  // the operations of all layers up to each
};

}  // namespace kvrag::host

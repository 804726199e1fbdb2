// Attention of all rows and heads, shared among threads.
#pragma once

#include "kernels.h"

namespace kvrag::host {

void run_attention(const Attention& attention, u32 threads);

// New rows of prompts, which are written to the prompts' buffers and attend to the keys there.
// Everything has one type, f32 or bf16; strides are in elements, channels are contiguous.
struct NewRows {
  ElementType type;
  const void* query;  // [num_kv_heads * group, num_rows, dim]
  const void* key;    // [num_kv_heads, num_rows, dim]
  const void* value;
  void* out;  // [num_rows, num_kv_heads * group, dim], packed
  i64 query_head_stride;
  i64 query_row_stride;
  i64 key_head_stride;
  i64 key_row_stride;
  i64 value_head_stride;
  i64 value_row_stride;
  u64 num_rows;
  u64 num_kv_heads;
  u64 group;
  u64 dim;
  const i64* places;  // [num_rows] where each row goes: it sees the keys up to there
  i64 window;
  float scale;
  float softcap;  // 0: none
};

// A row of each prompt of a batch that decodes.
struct RowOfEach : NewRows {
  const i64* key_addresses;  // [num_rows] of buffers [num_kv_heads, capacity, dim]
  const i64* value_addresses;
  const i64* capacities;
};

void run_attention(const RowOfEach& batch, u32 threads);

// Rows of one prompt, in ascending places.
struct RowsOfOne : NewRows {
  void* keys;  // [num_kv_heads, num_keys, dim], heads of a buffer that are `head_stride` apart
  void* values;
  i64 head_stride;
  u64 num_keys;
  float* mass;  // see `Attention`
  u64 first_counted;
};

void run_attention(const RowsOfOne& rows, u32 threads);

}  // namespace kvrag::host

// Properties of rows under a model, computed without coding a stream.
#pragma once

#include <tuple>

#include "model.h"
#include "payload.h"

namespace kvrag::host {

// The greatest sum of a row's class and one of its contexts, and the greatest context. Both are 0
// without rows.
struct Greatest {
  u64 table = 0;
  u8 context = 0;
};

Greatest greatest_classes(const u16* classes, const u8* contexts, i64 context_stride, u64 num_rows,
                          u64 num_tokens);

// The sum of -log2(frequency / 4096); infinite if a frequency is 0.
double code_length(const Model& model, const Rows<const u8>& rows);

// The first (row, token) whose symbol cannot be coded; (-1, -1) if all can.
std::tuple<i64, i64> uncodable_place(const Model& model, const Rows<const u8>& rows);

}  // namespace kvrag::host

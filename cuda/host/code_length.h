// Questions about rows and a model that no stream is needed for.
#pragma once

#include <tuple>

#include "model.h"
#include "payload.h"

namespace kvrag::host {

// The greatest sum of a row's class and one of its contexts, and the greatest context; 0 without
// rows.
struct Greatest {
  u64 table = 0;
  u8 context = 0;
};

Greatest greatest_classes(const u16* classes, const u8* contexts, i64 context_stride, u64 num_rows,
                          u64 num_tokens);

// The sum of -log2(frequency / 4096); infinite where a frequency is 0.
double code_length(const Model& model, const Rows<const u8>& rows);

// First (row, token) whose symbol cannot be coded, (-1, -1) where all can.
std::tuple<i64, i64> uncodable_place(const Model& model, const Rows<const u8>& rows);

}  // namespace kvrag::host

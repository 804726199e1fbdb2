#include "code_length.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace kvrag::host {
namespace {

u32 frequency_at(const Model& model, const Rows<const u8>& rows, u64 row, u64 token) {
  u64 row_class = rows.classes[row];
  if (rows.contexts != nullptr) {
    row_class +=
        rows.contexts[static_cast<i64>(row) * rows.context_stride + static_cast<i64>(token)];
  }
  const i64 place = static_cast<i64>(row) * rows.row_stride + static_cast<i64>(token);
  return model.frequency(row_class, rows.symbols[place]);
}

}  // namespace

Greatest greatest_classes(const u16* classes, const u8* contexts, i64 context_stride, u64 num_rows,
                          u64 num_tokens) {
  Greatest greatest;
  for (u64 row = 0; row < num_rows; ++row) {
    u8 context = 0;
    if (contexts != nullptr) {
      const u8* found = contexts + static_cast<i64>(row) * context_stride;
      for (u64 i = 0; i < num_tokens; ++i) context = found[i] > context ? found[i] : context;
    }
    greatest.table = std::max(greatest.table, u64{classes[row]} + context);
    greatest.context = std::max(greatest.context, context);
  }
  return greatest;
}

double code_length(const Model& model, const Rows<const u8>& rows) {
  std::vector<double> bits(rans::kNumSlots + 1);
  bits[0] = std::numeric_limits<double>::infinity();
  for (u32 i = 1; i <= rans::kNumSlots; ++i) {
    bits[i] = rans::kProbabilityBits - std::log2(static_cast<double>(i));
  }
  double total = 0;
  for (u64 row = 0; row < rows.num_rows; ++row) {
    double of_row = 0;
    for (u64 token = 0; token < rows.num_tokens; ++token) {
      of_row += bits[frequency_at(model, rows, row, token)];
    }
    total += of_row;
  }
  return total;
}

std::tuple<i64, i64> uncodable_place(const Model& model, const Rows<const u8>& rows) {
  for (u64 row = 0; row < rows.num_rows; ++row) {
    for (u64 token = 0; token < rows.num_tokens; ++token) {
      if (frequency_at(model, rows, row, token) == 0) {
        return {static_cast<i64>(row), static_cast<i64>(token)};
      }
    }
  }
  return {-1, -1};
}

}  // namespace kvrag::host

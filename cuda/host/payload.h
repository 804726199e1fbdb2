// Payloads: several streams after an index of their sizes. kvrag/rans.h describes the bytes.
#pragma once

#include <vector>

#include "kernels.h"

namespace kvrag::host {

// The matrix in a payload: symbols [num_rows, num_tokens], one class for each row, and contexts
// [num_rows, num_tokens] unless they are nullptr.
template <class Symbol>
struct Rows {
  Symbol* symbols;
  i64 row_stride;
  const u16* classes;
  const u8* contexts;
  i64 context_stride;
  u64 num_rows;
  u64 num_tokens;
  u8 most_context = 255;  // no context is greater
};

struct DecodeJob {
  const u8* bytes;
  u64 size_bytes;
  DecodeTables tables;
  Rows<u8> rows;
};

// What is wrong with a payload; `stream` is the damaged stream's number, if one is.
struct Failure {
  Damage damage = Damage::none;
  u64 stream = 0;
  u64 expected = 0;
  u64 found = 0;
};

// Decode all jobs on up to `threads` threads; return one Failure for each. The output of a job
// that failed is garbage. Every class plus context must be a class of the job's model.
std::vector<Failure> decode_payloads(const std::vector<DecodeJob>& jobs, u32 threads);

// Return the payload, or nothing if a symbol has frequency 0.
std::vector<u8> encode_payload(const Rows<const u8>& rows, const u32* tables, u64 num_streams,
                               u32 threads);

}  // namespace kvrag::host

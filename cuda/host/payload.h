// Payloads: several streams behind an index of their sizes. kvrag/rans.h describes the bytes.
#pragma once

#include <vector>

#include "kernels.h"

namespace kvrag::host {

// The matrix a payload holds: symbols [num_rows, num_tokens], one class a row, and, unless it
// is nullptr, contexts [num_rows, num_tokens].
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

// What is wrong with a payload; `stream` counts from 0 where the damage is in one.
struct Failure {
  Damage damage = Damage::none;
  u64 stream = 0;
  u64 expected = 0;
  u64 found = 0;
};

// Decode all jobs on up to `threads` threads; one Failure a job. The output of a job that
// failed is garbage. Every class plus context must be one of its
// model's.
std::vector<Failure> decode_payloads(const std::vector<DecodeJob>& jobs, u32 threads);

// Return the payload, or nothing where a symbol has frequency 0.
std::vector<u8> encode_payload(const Rows<const u8>& rows, const u32* tables, u64 num_streams,
                               u32 threads);

}  // namespace kvrag::host

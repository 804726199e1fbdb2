#include "payload.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>

#include "dispatch.h"
#include "kvrag/rans.h"
#include "pool.h"

namespace kvrag::host {
namespace {

// Below this, a second thread costs more than it saves.
constexpr u64 kSymbolsPerThread = 1 << 15;

u32 useful_threads(u64 num_symbols, u32 threads) {
  return static_cast<u32>(std::clamp<u64>(num_symbols / kSymbolsPerThread, 1, threads));
}

u32 read_u32(const u8* bytes) {
  u32 value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

template <class Symbol>
Symbol* symbols_from(const Rows<Symbol>& rows, u64 row) {
  return rows.symbols + static_cast<i64>(row) * rows.row_stride;
}

template <class Symbol>
const u8* contexts_from(const Rows<Symbol>& rows, u64 row) {
  if (rows.contexts == nullptr) return nullptr;
  return rows.contexts + static_cast<i64>(row) * rows.context_stride;
}

// Append the streams of `job`, or return why its index is invalid.
Failure split(const DecodeJob& job, std::vector<DecodeStream>& streams) {
  const Rows<u8>& rows = job.rows;
  const u64 most = std::max<u64>(rows.num_rows, 1);
  if (job.size_bytes < 4) return {Damage::payload_size, 0, 4, job.size_bytes};
  const u64 num_streams = read_u32(job.bytes);
  if (num_streams < 1 || num_streams > most) {
    return {Damage::stream_count, 0, most, num_streams};
  }
  const u64 index_bytes = 4 + 4 * num_streams;
  if (job.size_bytes < index_bytes) {
    return {Damage::payload_size, 0, index_bytes, job.size_bytes};
  }
  u64 needed = index_bytes;
  for (u64 i = 0; i < num_streams; ++i) needed += read_u32(job.bytes + 4 + 4 * i);
  if (needed != job.size_bytes) return {Damage::payload_size, 0, needed, job.size_bytes};
  u64 offset = index_bytes;
  for (u64 i = 0; i < num_streams; ++i) {
    const u64 size = read_u32(job.bytes + 4 + 4 * i);
    const u64 begin = rans::first_row(i, num_streams, rows.num_rows);
    const u64 end = rans::first_row(i + 1, num_streams, rows.num_rows);
    streams.push_back({job.bytes + offset, size, job.tables, rows.classes + begin,
                       contexts_from(rows, begin), rows.most_context, symbols_from(rows, begin),
                       rows.row_stride, rows.context_stride, end - begin, rows.num_tokens});
    offset += size;
  }
  return {};
}

struct Group {
  u64 first;
  u64 count;
};

// Streams to decode in parallel: of one job, at most `most`, and at most one thread's share.
std::vector<Group> group_streams(const std::vector<u64>& first_stream, u64 most, u32 threads) {
  const u64 share = (first_stream.back() + threads - 1) / threads;
  const u64 size = std::clamp<u64>(share, 1, most);
  std::vector<Group> groups;
  for (u64 job = 0; job + 1 < first_stream.size(); ++job) {
    const u64 count = first_stream[job + 1] - first_stream[job];
    const u64 num_groups = (count + size - 1) / size;
    for (u64 i = 0; i < num_groups; ++i) {
      const u64 begin = i * count / num_groups;
      const u64 end = (i + 1) * count / num_groups;
      groups.push_back({first_stream[job] + begin, end - begin});
    }
  }
  return groups;
}

}  // namespace

std::vector<Failure> decode_payloads(const std::vector<DecodeJob>& jobs, u32 threads) {
  std::vector<Failure> failures(jobs.size());
  std::vector<DecodeStream> streams;
  std::vector<u64> first_stream(jobs.size() + 1, 0);
  u64 num_symbols = 0;
  for (u64 i = 0; i < jobs.size(); ++i) {
    failures[i] = split(jobs[i], streams);
    first_stream[i + 1] = streams.size();
    num_symbols += jobs[i].rows.num_rows * jobs[i].rows.num_tokens;
  }
  std::vector<Damage> damage(streams.size());
  const Kernels& chosen = kernels();
  const u32 used = useful_threads(num_symbols, threads);
  const auto groups = group_streams(first_stream, chosen.streams_at_once, used);
  parallel_for(groups.size(), used, [&](u64 i) {
    const auto [first, count] = groups[i];
    chosen.decode(&streams[first], count, &damage[first]);
  });
  for (u64 job = 0; job < jobs.size(); ++job) {
    for (u64 i = first_stream[job]; i < first_stream[job + 1]; ++i) {
      if (damage[i] == Damage::none) continue;
      failures[job] = {damage[i], i - first_stream[job], 0, streams[i].size_bytes};
      break;
    }
  }
  return failures;
}

std::vector<u8> encode_payload(const Rows<const u8>& rows, const u32* tables, u64 num_streams,
                               u32 threads) {
  struct Scratch {
    std::unique_ptr<u8[]> bytes;
    EncodeStream stream;
    std::array<u32, rans::kNumLanes> states;
    u8* words = nullptr;
  };
  std::vector<Scratch> parts(num_streams);
  for (u64 i = 0; i < num_streams; ++i) {
    const u64 begin = rans::first_row(i, num_streams, rows.num_rows);
    const u64 count = rans::first_row(i + 1, num_streams, rows.num_rows) - begin;
    const u64 capacity = kEncodeSlack + 2 * count * rows.num_tokens;
    parts[i].bytes.reset(new u8[capacity]);
    parts[i].stream = {parts[i].bytes.get() + capacity,
                       tables,
                       rows.classes + begin,
                       contexts_from(rows, begin),
                       symbols_from(rows, begin),
                       rows.row_stride,
                       rows.context_stride,
                       count,
                       rows.num_tokens};
  }
  const Kernels& chosen = kernels();
  parallel_for(num_streams, useful_threads(rows.num_rows * rows.num_tokens, threads), [&](u64 i) {
    parts[i].words = chosen.encode(parts[i].stream, parts[i].states.data());
  });

  std::vector<u8> payload(4 + 4 * num_streams);
  const auto write_u32 = [&payload](u64 offset, u64 value) {
    const u32 narrow = static_cast<u32>(value);
    std::memcpy(payload.data() + offset, &narrow, sizeof narrow);
  };
  write_u32(0, num_streams);
  u64 total = payload.size();
  for (u64 i = 0; i < num_streams; ++i) {
    if (parts[i].words == nullptr) return {};
    const u64 size = rans::kStateBytes + static_cast<u64>(parts[i].stream.end - parts[i].words);
    write_u32(4 + 4 * i, size);
    total += size;
  }
  payload.reserve(total);
  for (const Scratch& part : parts) {
    const u8* states = reinterpret_cast<const u8*>(part.states.data());
    payload.insert(payload.end(), states, states + rans::kStateBytes);
    payload.insert(payload.end(), part.words, part.stream.end);
  }
  return payload;
}

}  // namespace kvrag::host

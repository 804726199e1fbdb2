// The coder on a GPU: one warp for each stream, one thread for each lane. So a vector of 32
// symbols is one step of a warp. kvrag/rans.h describes the bytes, which equal the host coder's.
//
// Blocks may have any multiple of 32 threads. Scalars are 64 bits wide, since the launcher passes
// Python's integers so.
#include "kvrag/rans.h"

using namespace kvrag;

namespace {

constexpr u32 kWarp = 0xffffffffu;

__device__ u64 warp_index() {
  return (u64{blockIdx.x} * blockDim.x + threadIdx.x) / rans::kNumLanes;
}

// The number of lanes below this one that are set in `mask`.
__device__ u32 rank_in(u32 mask, u32 lane) { return __popc(mask & ((1u << lane) - 1)); }

// Index of a symbol's table. A class beyond the model's, which only damage can cause, becomes the
// last one, so that kernels do not read past the tables.
__device__ u64 table_index(u32 row_class, const u8* context, u64 token, u64 num_classes) {
  const u64 wanted = u64{row_class} + (context == nullptr ? 0 : context[token]);
  return wanted < num_classes ? wanted : num_classes - 1;
}

}  // namespace

// Decode the streams; stream i has the bytes from offsets[i] to offsets[i + 1]. The caller has
// checked that offsets are even and at least 128 apart. Writes a code of damage for each stream to
// `damage`. `contexts` may be null.
extern "C" __global__ void rans_decode(const u8* payload, const u64* offsets, u64 num_streams,
                                       const u32* tables, u64 num_classes, const u16* classes,
                                       const u8* contexts, i64 context_stride, u8* symbols,
                                       i64 row_stride, u64 num_rows, u64 num_tokens, i32* damage) {
  const u64 stream = warp_index();
  const u32 lane = threadIdx.x % rans::kNumLanes;
  if (stream >= num_streams) return;
  // States are aligned to 2 bytes only, so they are read in halves.
  const u16* states = reinterpret_cast<const u16*>(payload + offsets[stream]);
  u32 state = states[2 * lane] | u32{states[2 * lane + 1]} << 16;
  const u16* words = states + 2 * rans::kNumLanes;
  const u64 num_words = (offsets[stream + 1] - offsets[stream] - rans::kStateBytes) / 2;
  u64 next = 0;

  rans::Damage found = rans::Damage::none;
  if (__any_sync(kWarp, rans::needs_word(state))) found = rans::Damage::initial_state;
  const u64 end = rans::first_row(stream + 1, num_streams, num_rows);
  for (u64 row = rans::first_row(stream, num_streams, num_rows);
       row < end && found == rans::Damage::none; ++row) {
    const u32 row_class = classes[row];
    u8* out = symbols + static_cast<i64>(row) * row_stride;
    const u8* context =
        contexts == nullptr ? nullptr : contexts + static_cast<i64>(row) * context_stride;
    for (u64 token = lane; token < num_tokens + lane; token += rans::kNumLanes) {
      const bool active = token < num_tokens;
      if (active) {
        const u64 table = table_index(row_class, context, token, num_classes);
        const u32 entry = tables[table * rans::kNumSlots + rans::slot_of(state)];
        out[token] = rans::symbol_of(entry);
        state = rans::pop(state, entry);
      }
      const bool refill = active && rans::needs_word(state);
      const u32 mask = __ballot_sync(kWarp, refill);
      const u32 count = __popc(mask);
      if (count > num_words - next) {
        found = rans::Damage::words_missing;
        break;
      }
      if (refill) state = rans::with_word(state, words[next + rank_in(mask, lane)]);
      next += count;
    }
  }
  if (found == rans::Damage::none && next != num_words) found = rans::Damage::words_left;
  const bool wrong = __any_sync(kWarp, state != rans::kLowerBound);
  if (found == rans::Damage::none && wrong) found = rans::Damage::final_state;
  if (lane == 0) damage[stream] = static_cast<i32>(found);
}

// Encode the streams backwards. Stream i uses the words of its rows in `scratch`
// [num_rows * num_tokens] and writes downwards from their end. It leaves its states in `states`
// [num_streams, 32] and its length in `num_words` [num_streams], or -1 if a symbol has frequency 0.
extern "C" __global__ void rans_encode(const u8* symbols, i64 row_stride, const u16* classes,
                                       const u8* contexts, i64 context_stride, const u32* tables,
                                       u64 num_classes, u64 num_streams, u64 num_rows,
                                       u64 num_tokens, u16* scratch, u32* states, i64* num_words) {
  const u64 stream = warp_index();
  const u32 lane = threadIdx.x % rans::kNumLanes;
  if (stream >= num_streams) return;
  const u64 begin = rans::first_row(stream, num_streams, num_rows);
  const u64 end = rans::first_row(stream + 1, num_streams, num_rows);
  u16* words = scratch + end * num_tokens;
  i64 next = 0;
  u32 state = rans::kLowerBound;
  const u64 num_vectors = (num_tokens + rans::kNumLanes - 1) / rans::kNumLanes;
  for (u64 row = end; row-- > begin;) {
    const u32 row_class = classes[row];
    const u8* in = symbols + static_cast<i64>(row) * row_stride;
    const u8* context =
        contexts == nullptr ? nullptr : contexts + static_cast<i64>(row) * context_stride;
    for (u64 vector = num_vectors; vector-- > 0;) {
      const u64 token = vector * rans::kNumLanes + lane;
      const bool active = token < num_tokens;
      u32 entry = 0;
      if (active) {
        const u64 table = table_index(row_class, context, token, num_classes);
        entry = tables[table * rans::kMaxSymbols + in[token]];
      }
      if (__any_sync(kWarp, active && entry == 0)) {
        if (lane == 0) num_words[stream] = -1;
        return;
      }
      const bool emit = active && rans::must_emit(state, entry);
      const u32 mask = __ballot_sync(kWarp, emit);
      next -= __popc(mask);
      if (emit) {
        words[next + rank_in(mask, lane)] = static_cast<u16>(state);
        state >>= rans::kWordBits;
      }
      if (active) state = rans::push(state, entry);
    }
  }
  states[stream * rans::kNumLanes + lane] = state;
  if (lane == 0) num_words[stream] = -next;
}

// Copy the results of rans_encode into a payload, stream i to offsets[i]. Offsets are even. The
// caller writes the index before the streams. The grid has at most one block for each stream.
extern "C" __global__ void rans_pack(const u16* scratch, const u32* states, const u64* offsets,
                                     u64 num_streams, u64 num_rows, u64 num_tokens, u8* payload) {
  for (u64 stream = blockIdx.x; stream < num_streams; stream += gridDim.x) {
    u16* out = reinterpret_cast<u16*>(payload + offsets[stream]);
    const u64 size = (offsets[stream + 1] - offsets[stream]) / 2;
    const u64 num_halves = 2 * rans::kNumLanes;
    const u16* words =
        scratch + rans::first_row(stream + 1, num_streams, num_rows) * num_tokens - size;
    for (u64 i = threadIdx.x; i < size; i += blockDim.x) {
      const u32 state = i < num_halves ? states[stream * rans::kNumLanes + i / 2] : 0;
      out[i] = i < num_halves ? static_cast<u16>(i % 2 == 0 ? state : state >> 16) : words[i];
    }
  }
}

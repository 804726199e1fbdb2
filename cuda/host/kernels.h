// The kernels that every instruction set provides, as a table of functions, chosen at run time.
#pragma once

#include "kvrag/common.h"
#include "kvrag/rans.h"
#include "kvrag/reconstruct.h"
#include "register_tables.h"

namespace kvrag::host {

using rans::Damage;

// One stream to decode. Its rows begin at `symbols` and `classes`.
struct DecodeStream {
  const u8* bytes;
  u64 size_bytes;
  DecodeTables tables;
  const u16* classes;
  const u8* contexts;  // nullptr where a row has one table
  u8 most_context;     // no context is greater
  u8* symbols;
  i64 row_stride;
  i64 context_stride;
  u64 num_rows;
  u64 num_tokens;
};

// One stream to encode. Words are written downwards from `end`. Below it there must be room for
// one word a symbol, and for `kEncodeSlack` more bytes that vector stores may overwrite.
struct EncodeStream {
  u8* end;
  const u32* tables;  // [num_classes, 256]
  const u16* classes;
  const u8* contexts;
  const u8* symbols;
  i64 row_stride;
  i64 context_stride;
  u64 num_rows;
  u64 num_tokens;
};

constexpr u64 kEncodeSlack = 64;

// Whole numbers [num_rows, tokens of the chunk]: symbols, or values if those are nullptr. Patches
// are sorted by token, then row.
struct Numbers {
  const u8* symbols;
  const i16* values;
  i64 row_stride;
  u64 num_rows;
  const float* shrink;  // [num_rows] or nullptr
  const u32* patch_rows;
  const u32* patch_tokens;
  const float* patch_values;
  u64 num_patches;
};

// The destination of tokens first_token to first_token + num_tokens: out [num_heads, num_tokens,
// head_dim], strides in elements. Unless num_rotated is 0, tokens are rotated by tables
// [num_tokens, at least num_rotated / 2].
struct Placement {
  void* out;
  ElementType type;
  i64 head_stride;
  i64 token_stride;
  u64 num_heads;
  u64 head_dim;
  u64 first_token;
  u64 num_tokens;
  const float* cos;
  const float* sin;
  i64 cos_stride;
  i64 sin_stride;
  u64 num_rotated;
};

struct Transform {
  const float* basis;  // [num_heads, num_rows, head_dim]
  const float* mean;   // [num_heads, head_dim]
};

// How many tokens a kernel takes at once, and how many share one pass over a basis.
constexpr u64 kTileTokens = 32;
constexpr u64 kPanelTokens = 8;

// Floats of scratch that the tile kernels need.
constexpr u64 transform_scratch(u64 num_rows, u64 head_dim) {
  const u64 panels = kTileTokens * num_rows;
  const u64 rows = (kTileTokens / kPanelTokens + 1) * num_rows;
  return panels + rows + kPanelTokens * head_dim + 64;
}

// Rows of queries that attend to the keys before them. Queries, keys, values and the output have
// one type, f32 or bf16; strides are in elements, channels are contiguous.
struct Attention {
  ElementType type;
  const void* query;  // [num_kv_heads * group, num_rows, key_dim]
  const void* key;    // [num_kv_heads, keys, key_dim]
  const void* value;  // [num_kv_heads, keys, value_dim]
  void* out;          // [num_rows, num_kv_heads * group, value_dim], packed
  i64 query_head_stride;
  i64 query_row_stride;
  i64 key_head_stride;
  i64 key_row_stride;
  i64 value_head_stride;
  i64 value_row_stride;
  u64 num_rows;
  u64 num_keys;
  u64 num_kv_heads;
  u64 group;  // query heads that share a key head
  u64 key_dim;
  u64 value_dim;
  const i64* last_keys;  // [num_rows] the last key that each row sees, ascending
  i64 window;            // how many keys a row sees at most
  float scale;           // of the scores, before they are capped
  float softcap;         // 0: none
  float* mass;           // [num_kv_heads, num_keys] or nullptr: what rows' weights sum to
  u64 first_counted;     // the first row that counts for it
};

// Keys whose scores exist at a time; a multiple of what the instruction sets take at once.
constexpr u64 kAttentionBlock = 96;

// Floats of scratch for `lanes` rows that attend together, a strip: its state, its weights of one
// block of keys, and those of all blocks, which are kept if keys' mass is asked for.
constexpr u64 attention_strip(u64 lanes, u64 key_dim, u64 value_dim) {
  return lanes * (key_dim + value_dim + 4);
}
constexpr u64 attention_weights(u64 lanes) { return (kAttentionBlock + 1) * lanes; }
constexpr u64 attention_kept(const Attention& a, u64 lanes) {
  const u64 blocks = (a.num_keys + kAttentionBlock - 1) / kAttentionBlock;
  return a.mass == nullptr ? 0 : blocks * attention_weights(lanes);
}
constexpr u64 attention_scratch(const Attention& a, u64 lanes, u64 strips) {
  const u64 strip = attention_strip(lanes, a.key_dim, a.value_dim) + attention_kept(a, lanes);
  return attention_weights(lanes) + kAttentionBlock * (a.key_dim + a.value_dim) + strips * strip;
}

// The same for few rows: a position's queries and all its scores.
constexpr u64 attention_few(const Attention& a) { return a.group * (a.key_dim + a.num_keys); }

// A linear layer over few rows: out = input weight^T + bias. Everything is contiguous and has one
// type, f32 or bf16.
struct Linear {
  ElementType type;
  const void* input;   // [num_rows, num_inputs]
  const void* weight;  // [num_outputs, num_inputs]
  const void* bias;    // [num_outputs] or nullptr
  void* out;           // [num_rows, num_outputs]
  u64 num_rows;
  u64 num_inputs;
  u64 num_outputs;
};

// Floats of scratch that a linear layer needs, and that each of its rows needs besides its inputs.
constexpr u64 kLinearScratch = 1536;
constexpr u64 kLinearRowScratch = 32;
constexpr u64 linear_scratch(const Linear& layer) {
  return layer.num_rows * (layer.num_inputs + kLinearRowScratch) + kLinearScratch;
}

// A linear layer in 8 bits. Input and output have one type, f32 or bf16.
struct Int8Linear {
  ElementType type;
  const void* input;   // [num_rows, num_inputs]
  const u8* weight;    // [panels, quads of inputs, kInt8Panel outputs, 4], each plus 128
  const float* scale;  // [panels * kInt8Panel] of the weights
  const float* bias;   // [panels * kInt8Panel]
  void* out;           // [num_rows, num_outputs]
  u64 num_rows;
  u64 num_inputs;
  u64 num_outputs;
};

// Rows over the root of their mean square, times weights. Everything is contiguous and has one
// type, f32 or bf16.
struct Norm {
  ElementType type;
  const void* input;   // [rows, width]
  const void* weight;  // [width]
  void* out;           // [rows, width]
  u64 width;
  float epsilon;  // added to the mean
  bool adds_one;  // to the weights, and rounds only products; otherwise rows are rounded before too
};

// An activation of one number times another, as between an MLP's layers. One type, f32 or bf16.
struct Gate {
  ElementType type;
  const void* gate;
  const void* up;
  void* out;
  bool is_gelu;  // by tanh; otherwise SiLU
};

// Rows whose first channels are rotated, in halves: each token has its own angles. One type, f32 or
// bf16; strides are in elements, channels are contiguous.
struct Rotation {
  ElementType type;
  const void* input;  // [heads, tokens, head_dim]
  void* out;          // the same shape
  i64 input_head_stride;
  i64 input_token_stride;
  i64 out_head_stride;
  i64 out_token_stride;
  u64 head_dim;
  u64 num_rotated;
  const float* cos;  // [tokens, at least num_rotated / 2]
  const float* sin;
  i64 angle_stride;  // of both
};

constexpr u64 kInt8Panel = 64;
// A row's inputs with what fills its last quad.
constexpr u64 int8_stride(u64 num_inputs) { return (num_inputs + 3) / 4 * 4; }

// Rows in 8 bits, each with its scale and with what its sums begin at.
struct Int8Rows {
  i8* values;  // [num_rows, int8_stride]
  float* scales;
  i32* starts;
};

// A linear layer with weights of 4 to 8 bits. Inputs come in groups of kGroup; the last is filled
// up with zeros.
constexpr u64 kGroup = 32;
constexpr u64 kGroupedRows = 96;  // that one call multiplies at most
constexpr u64 grouped_groups(u64 num_inputs) { return (num_inputs + kGroup - 1) / kGroup; }
// Bytes of a group, for a panel of outputs.
constexpr u64 grouped_bytes(u64 bits) { return kGroup * kInt8Panel * bits / 8; }

struct GroupedLinear {
  ElementType type;
  const void* input;  // [num_rows, num_inputs]
  // [panels, groups, planes, kInt8Panel outputs, 4 bytes]. A quad is four inputs, a byte each. With
  // 8 bits a plane is a quad. With fewer, four planes have an even quad's lower 4 bits below an odd
  // one's. Then, with 5 bits, a plane has the fifth bit of quad q at bit q; with 6 bits, two planes
  // have bits 4 and 5 of quads q and q + 4 from bit 2 q on.
  const u8* weight;
  const u16* scale;  // half precision: [panels, groups, 2 with 6 bits (for each half of a group),
                     // kInt8Panel]
  const u16*
      least;  // the same, of groups: what 0 stands for; nullptr: 0 stands for minus half the range
  const float* bias;  // [panels * kInt8Panel]
  float factor;       // of all scales
  void* out;          // [num_rows, num_outputs]
  u64 bits;
  u64 num_rows;
  u64 num_inputs;
  u64 num_outputs;
};

// What Python holds of it: all but rows and their type.
struct GroupedWeights {
  GroupedLinear layer;
};

// Rows in 8 bits: each group has its scale, and the sums of its halves.
struct GroupedRows {
  i8* values;     // [num_rows, groups, kGroup]
  float* scales;  // [num_rows, groups]
  i32* sums;      // [num_rows, groups, 2]
};

// Numbers of fixed width, in bands of channels. A band's row is a byte, its scale, then the bits of
// its numbers, eight of one width after the other.
constexpr u64 kPackedGroup = 8;
constexpr u64 kPackedPanel = 32;  // channels
constexpr u64 kPackedBits = 6;
constexpr i32 kPackedMiddle = 127;  // twice a level is so much more than what it stands for
constexpr u64 packed_panels(u64 channels) { return (channels + kPackedPanel - 1) / kPackedPanel; }

struct Packed {
  const u8* rows;  // [tokens of the chunk, row_bytes], the first band's; 8 bytes more can be read
  u64 row_bytes;
  u64 num_bands;
  u64 band_channels;
  u64 band_bytes;
  u64 num_numbers;      // of a band, whole groups
  const u8* widths;     // [num_bands, num_numbers / kPackedGroup], at most kPackedBits
  const i8* basis;      // [num_bands, panels, quads of numbers, kPackedPanel channels, 4]
  const i32* starts;    // [num_bands, panels * kPackedPanel]: what numbers of 0 add up to
  const float* mean;    // the same shape
  const float* scales;  // [num_bands]
  const float* powers;  // [256]: of a token's scale
  const u8* levels;     // [128], at most 127: number u of w bits stands for level 2^w + u
};

struct PackedPart {
  Packed packed;
  Placement placement;
};

constexpr u64 packed_stride(const Packed& p) {
  return (p.num_bands - 1) * p.band_channels + packed_panels(p.band_channels) * kPackedPanel;
}
constexpr u64 packed_scratch(const Packed& p) {
  return kTileTokens * (packed_stride(p) + p.num_numbers / 4);
}

// One band's numbers, in units of its basis, to its part of rows.
struct Packing {
  const float* numbers;  // [tokens, num_numbers]
  u64 num_numbers;
  const u8* widths;
  const float* weights;   // [num_numbers / kPackedGroup]: of a squared error
  const float* powers;    // [256], ascending
  const u8* nearest;      // [kPackedBits + 1, 256]: the number nearest to a place
  const float* meanings;  // the same shape: what it stands for, whole numbers from -127 to 127
  u8* rows;               // its first
  u64 row_bytes;
  float* lost;  // [tokens]: what rounding loses, squared
};

struct Kernels {
  const char* name;
  // Decode `count` streams of one payload, 1 to `streams_at_once`; one Damage for each.
  void (*decode)(const DecodeStream* streams, u64 count, Damage* damage) noexcept;
  u64 streams_at_once;
  // Returns the first byte of the words and fills `states` [32]; nullptr for a symbol of
  // frequency 0.
  u8* (*encode)(const EncodeStream&, u32* states) noexcept;
  // Write tokens [begin, end) of the placement, at most kTileTokens. Scratch is aligned to 64.
  void (*transform)(const Numbers&, const Transform&, const Placement&, u64 begin, u64 end,
                    float* scratch) noexcept;
  // The same of packed rows; pack rows [begin, end).
  void (*packed)(const Packed&, const Placement&, u64 begin, u64 end, float* scratch) noexcept;
  void (*pack)(const Packing&, u64 begin, u64 end) noexcept;
  // Refinement of numbers by digits to base 3; see planes.h.
  void (*contexts)(const i16* values, u8* contexts, u64 count) noexcept;
  void (*refine)(i16* values, const u8* symbols, u64 count) noexcept;
  // Attend with rows [begin, end) of a key head; row r is query head r % group of row r / group.
  // Add their weights to `mass` [num_keys], unless it is nullptr.
  void (*attend)(const Attention&, u64 kv_head, u64 begin, u64 end, float* mass,
                 float* scratch) noexcept;
  u64 attention_lanes;
  // Compute outputs [begin, end) of all rows. Scratch has room for `linear_scratch`.
  void (*linear)(const Linear&, u64 begin, u64 end, float* scratch) noexcept;
  // Quantise rows [begin, end), and compute one panel's outputs for such rows.
  void (*int8_quantise)(const Int8Linear&, const Int8Rows&, u64 begin, u64 end) noexcept;
  void (*int8_multiply)(const Int8Linear&, const Int8Rows&, u64 begin, u64 end, u64 panel) noexcept;
  // The same, of weights by groups; at most kGroupedRows rows.
  void (*grouped_quantise)(const GroupedLinear&, const GroupedRows&, u64 begin, u64 end) noexcept;
  void (*grouped_multiply)(const GroupedLinear&, const GroupedRows&, u64 begin, u64 end,
                           u64 panel) noexcept;
  // Compute rows [begin, end), or numbers [begin, end).
  void (*norm)(const Norm&, u64 begin, u64 end) noexcept;
  void (*gate)(const Gate&, u64 begin, u64 end) noexcept;
  // Tokens [begin, end) of a head.
  void (*rotate)(const Rotation&, u64 head, u64 begin, u64 end) noexcept;
};

extern const Kernels kScalar;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
const Kernels& avx512_vbmi2();
const Kernels& avx512_bf16();
const Kernels& amx_bf16();
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

}  // namespace kvrag::host

// Reconstruction on a GPU. kvrag/reconstruct.h has the arithmetic of one element. A library
// computes the sum over rows as a matrix product, between `dequantise` and `place`.
//
// Element types are codes: for numbers 0 is symbols (u8) and 1 is i16; for floats see ElementType.
// Scalars are 64 bits wide, since the launcher passes Python's integers so. Strides count elements.
#include "kvrag/reconstruct.h"

using namespace kvrag;

namespace {

__device__ i32 number_at(const void* numbers, i64 type, i64 index) {
  return type == 0 ? static_cast<const u8*>(numbers)[index] - kZeroSymbol
                   : static_cast<const i16*>(numbers)[index];
}

__device__ void store_at(void* out, i64 type, i64 index, float value) {
  switch (static_cast<ElementType>(type)) {
    case ElementType::f32:
      static_cast<float*>(out)[index] = value;
      break;
    case ElementType::bf16:
      static_cast<u16*>(out)[index] = reconstruct::to_bf16(value);
      break;
    case ElementType::f16:
      static_cast<u16*>(out)[index] = reconstruct::to_f16(value);
      break;
  }
}

__device__ u64 thread_index() { return u64{blockIdx.x} * blockDim.x + threadIdx.x; }

__device__ u64 num_threads() { return u64{gridDim.x} * blockDim.x; }

// The destination of [num_heads, num_tokens, head_dim], and the tables of the tokens' positions.
struct Target {
  const float* cos;
  i64 cos_stride;
  const float* sin;
  i64 sin_stride;
  u64 num_rotated;
  void* out;
  i64 type;
  i64 head_stride;
  i64 token_stride;
};

// A row's units of work: its rotated pairs of channels, then the channels that are not rotated.
__device__ u64 num_units(const Target& target, u64 head_dim) {
  return head_dim - target.num_rotated / 2;
}

// Write one unit of the row whose channels are `channel(d)`.
template <class Channel>
__device__ void place_unit(const Target& target, u64 head, u64 token, u64 unit,
                           const Channel& channel) {
  const u64 half = target.num_rotated / 2;
  const i64 place =
      static_cast<i64>(head) * target.head_stride + static_cast<i64>(token) * target.token_stride;
  const i64 low = place + static_cast<i64>(unit);
  const i64 high = low + static_cast<i64>(half);
  if (unit >= half) {
    store_at(target.out, target.type, high, channel(unit + half));
    return;
  }
  const float first = channel(unit);
  const float second = channel(unit + half);
  const float cos =
      target.cos[static_cast<i64>(token) * target.cos_stride + static_cast<i64>(unit)];
  const float sin =
      target.sin[static_cast<i64>(token) * target.sin_stride + static_cast<i64>(unit)];
  store_at(target.out, target.type, low, reconstruct::rotate_first(first, second, cos, sin));
  store_at(target.out, target.type, high, reconstruct::rotate_second(first, second, cos, sin));
}

constexpr u64 kTile = 32;

}  // namespace

// Write the points of tokens from first_token on, [num_rows, num_tokens]. Rows are `out_stride`
// apart.
extern "C" __global__ void dequantise(const void* numbers, i64 number_type, i64 row_stride,
                                      const float* shrink, u64 num_rows, u64 first_token,
                                      u64 num_tokens, void* out, i64 out_type, i64 out_stride) {
  for (u64 i = thread_index(); i < num_rows * num_tokens; i += num_threads()) {
    const i64 row = static_cast<i64>(i / num_tokens);
    const i64 token = static_cast<i64>(i % num_tokens);
    const i32 number =
        number_at(numbers, number_type, row * row_stride + static_cast<i64>(first_token) + token);
    const float point = reconstruct::point(number, shrink == nullptr ? 0.0f : shrink[row]);
    store_at(out, out_type, row * out_stride + token, point);
  }
}

// Replace points that `dequantise` has written.
extern "C" __global__ void patch(const u32* rows, const u32* tokens, const float* values,
                                 u64 num_patches, u64 num_rows, u64 first_token, u64 num_tokens,
                                 void* out, i64 out_type, i64 out_stride) {
  for (u64 i = thread_index(); i < num_patches; i += num_threads()) {
    if (rows[i] >= num_rows || tokens[i] < first_token) continue;
    if (tokens[i] - first_token >= num_tokens) continue;
    const i64 token = static_cast<i64>(tokens[i] - first_token);
    store_at(out, out_type, static_cast<i64>(rows[i]) * out_stride + token, values[i]);
  }
}

// Add the mean to channels [num_heads, num_tokens, head_dim], float32 and contiguous; rotate, round
// and place them. `mean` may be null. With `num_rotated` 0, nothing is rotated.
extern "C" __global__ void place(const float* channels, const float* mean, u64 num_heads,
                                 u64 num_tokens, u64 head_dim, const float* cos, i64 cos_stride,
                                 const float* sin, i64 sin_stride, u64 num_rotated, void* out,
                                 i64 out_type, i64 head_stride, i64 token_stride) {
  const Target target{cos, cos_stride, sin,         sin_stride,  num_rotated,
                      out, out_type,   head_stride, token_stride};
  const u64 units = num_units(target, head_dim);
  for (u64 i = thread_index(); i < num_heads * num_tokens * units; i += num_threads()) {
    const u64 token = i / units % num_tokens;
    const u64 head = i / units / num_tokens;
    const float* row = channels + (head * num_tokens + token) * head_dim;
    const float* offset = mean + head * head_dim;
    place_unit(target, head, token, i % units,
               [&](u64 d) { return mean == nullptr ? row[d] : row[d] + offset[d]; });
  }
}

// Place rows that are channels already, num_heads * head_dim of them: scale, add, transpose, place.
// Factors may be null. token_scale and addend belong to the whole chunk; its token first_token is
// written first. One block takes 32 tokens of one head, and transposes them in shared memory of
// 32 * (head_dim + 1) floats, which keeps a warp's columns in different banks. Blocks have a
// multiple of 32 threads; the grid is (tiles, heads).
extern "C" __global__ void channels(const void* numbers, i64 number_type, i64 row_stride,
                                    const float* shrink, const float* row_scale,
                                    const float* token_scale, const float* addend,
                                    i64 addend_stride, const u32* patch_rows,
                                    const u32* patch_tokens, const float* patch_values,
                                    u64 num_patches, u64 first_token, u64 num_tokens, u64 head_dim,
                                    const float* cos, i64 cos_stride, const float* sin,
                                    i64 sin_stride, u64 num_rotated, void* out, i64 out_type,
                                    i64 head_stride, i64 token_stride) {
  extern __shared__ float tile[];  // [32, head_dim + 1]
  const u64 pitch = head_dim + 1;
  const u64 head = blockIdx.y;
  const u64 first_row = head * head_dim;
  const u64 begin = u64{blockIdx.x} * kTile;  // counted from first_token
  const u64 count = num_tokens - begin < kTile ? num_tokens - begin : kTile;
  const u64 lane = threadIdx.x % kTile;
  const u64 warp = threadIdx.x / kTile;
  const u64 num_warps = blockDim.x / kTile;
  const i64 token = static_cast<i64>(first_token + begin + lane);

  if (lane < count) {
    for (u64 d = warp; d < head_dim; d += num_warps) {
      const i64 row = static_cast<i64>(first_row + d);
      const i32 number = number_at(numbers, number_type, row * row_stride + token);
      tile[lane * pitch + d] = reconstruct::point(number, shrink == nullptr ? 0.0f : shrink[row]);
    }
  }
  __syncthreads();
  if (num_patches != 0) {
    const u64 first = reconstruct::first_patch(patch_tokens, num_patches, first_token + begin);
    const u64 last =
        reconstruct::first_patch(patch_tokens, num_patches, first_token + begin + count);
    for (u64 i = first + threadIdx.x; i < last; i += blockDim.x) {
      if (patch_rows[i] < first_row || patch_rows[i] - first_row >= head_dim) continue;
      tile[(patch_tokens[i] - first_token - begin) * pitch + patch_rows[i] - first_row] =
          patch_values[i];
    }
    __syncthreads();
  }
  if (lane < count) {
    for (u64 d = warp; d < head_dim; d += num_warps) {
      const i64 row = static_cast<i64>(first_row + d);
      float value = tile[lane * pitch + d];
      if (row_scale != nullptr) value *= row_scale[row];
      if (token_scale != nullptr) value *= token_scale[token];
      if (addend != nullptr) value += addend[row * addend_stride + token];
      tile[lane * pitch + d] = value;
    }
  }
  __syncthreads();
  const Target target{cos, cos_stride, sin,         sin_stride,  num_rotated,
                      out, out_type,   head_stride, token_stride};
  const u64 units = num_units(target, head_dim);
  for (u64 i = threadIdx.x; i < count * units; i += blockDim.x) {
    const float* row = tile + i / units * pitch;
    place_unit(target, head, begin + i / units, i % units, [&](u64 d) { return row[d]; });
  }
}

extern "C" __global__ void magnitude_contexts(const i16* values, u8* contexts, u64 count) {
  for (u64 i = thread_index(); i < count; i += num_threads()) {
    contexts[i] = reconstruct::context_of(values[i]);
  }
}

extern "C" __global__ void refine(i16* values, const u8* symbols, u64 count) {
  for (u64 i = thread_index(); i < count; i += num_threads()) {
    values[i] = reconstruct::refined(values[i], symbols[i]);
  }
}

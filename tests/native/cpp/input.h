// What the C++ tests feed to the kernels, and how they fail.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "model.h"
#include "payload.h"
#include "placement.h"

namespace kvrag::host {

inline std::mt19937_64 engine;

inline u64 below(u64 end) { return engine() % end; }

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", kernels().name, what.c_str());
  std::exit(1);
}

inline void check(bool condition, const char* what) {
  if (!condition) fail(what);
}

// Heap memory of exactly `count` elements: one past its end is somebody else's.
template <class T>
std::unique_ptr<T[]> exactly(u64 count) {
  return std::unique_ptr<T[]>(new T[count]());
}

struct Matrix {
  u64 num_rows, num_tokens, num_classes;
  std::vector<u16> frequencies;
  std::unique_ptr<u8[]> symbols, contexts;
  std::unique_ptr<u16[]> classes;

  template <class Symbol>
  Rows<Symbol> rows(Symbol* where) const {
    const i64 stride = static_cast<i64>(num_tokens);
    return {where,      stride, classes.get(), contexts.get(), contexts ? stride : 0, num_rows,
            num_tokens, 2};
  }
};

inline Matrix random_matrix(u64 num_rows, u64 num_tokens) {
  Matrix m;
  m.num_rows = num_rows;
  m.num_tokens = num_tokens;
  m.num_classes = 1 + below(4);
  const bool with_contexts = below(2) == 0;
  const u64 tables = m.num_classes + (with_contexts ? 2 : 0);
  m.frequencies.assign(tables * rans::kMaxSymbols, 0);
  // Few symbols have tables of their own in some instruction sets.
  constexpr u64 kAlphabets[] = {3, 40, rans::kMaxSymbols};
  const u64 num_symbols = kAlphabets[below(3)];
  for (u64 table = 0; table < tables; ++table) {
    u16* frequencies = &m.frequencies[table * rans::kMaxSymbols];
    u32 left = rans::kNumSlots;
    while (left > 0) {
      const u32 share = below(3) == 0 ? left : 1 + static_cast<u32>(below(left));
      frequencies[below(num_symbols)] += static_cast<u16>(share);
      left -= share;
    }
  }
  m.classes = exactly<u16>(m.num_rows);
  m.symbols = exactly<u8>(m.num_rows * m.num_tokens);
  if (with_contexts) m.contexts = exactly<u8>(m.num_rows * m.num_tokens);
  for (u64 row = 0; row < m.num_rows; ++row) {
    m.classes[row] = static_cast<u16>(below(m.num_classes));
    for (u64 token = 0; token < m.num_tokens; ++token) {
      const u64 place = row * m.num_tokens + token;
      u64 table = m.classes[row];
      if (with_contexts) table += m.contexts[place] = static_cast<u8>(below(3));
      const u16* frequencies = &m.frequencies[table * rans::kMaxSymbols];
      u64 slot = below(rans::kNumSlots);
      u32 symbol = 0;
      while (slot >= frequencies[symbol]) slot -= frequencies[symbol++];
      m.symbols[place] = static_cast<u8>(symbol);
    }
  }
  return m;
}

inline Model make_model(const Matrix& m) {
  return Model(m.frequencies.data(), m.frequencies.size() / rans::kMaxSymbols, rans::kMaxSymbols);
}

inline float uniform() { return static_cast<float>(below(20001)) / 10000.0f - 1.0f; }

template <class T, class Make>
std::unique_ptr<T[]> filled(u64 count, Make make) {
  auto found = exactly<T>(count);
  for (u64 i = 0; i < count; ++i) found[i] = make();
  return found;
}

// Up to the order of sums, in float32.
inline void check_close(const float* found, const float* expected, u64 count, const char* what) {
  float scale = 1.0f;
  for (u64 i = 0; i < count; ++i) scale = std::max(scale, std::fabs(expected[i]));
  for (u64 i = 0; i < count; ++i) check(std::fabs(found[i] - expected[i]) <= 1e-5f * scale, what);
}

// Something to reconstruct. Not to be moved: `numbers` and the others
// point into it.
struct Reconstruction {
  u64 num_heads = 1 + below(3);
  u64 head_dim = below(2) ? 8 * (1 + below(17)) : 1 + below(40);
  u64 num_tokens = 1 + below(80);
  u64 num_rows = below(50);
  std::unique_ptr<u8[]> symbols;
  std::unique_ptr<i16[]> values;
  std::unique_ptr<float[]> shrink, patches, cos, sin, basis, mean;
  std::vector<u32> patch_rows, patch_tokens;
  Numbers numbers{};
  Placement placement{};

  Reconstruction() {
    const u64 density = below(3);
    const auto number = [&] {
      return static_cast<i32>(below(3) < density ? below(255) : 127) - 127;
    };
    symbols = filled<u8>(num_rows * num_tokens, [&] { return number() + 128; });
    values = filled<i16>(num_rows * num_tokens, [&] { return number() * 50; });
    if (below(2) == 0) {
      numbers.symbols = symbols.get();
    } else {
      numbers.values = values.get();
    }
    numbers.row_stride = static_cast<i64>(num_tokens);
    numbers.num_rows = num_rows;
    shrink = filled<float>(num_rows, uniform);
    numbers.shrink = shrink.get();
    for (u64 token = 0; token < num_tokens; ++token) {
      for (u64 row = 0; row < num_rows; ++row) {
        if (below(40) != 0) continue;
        patch_rows.push_back(static_cast<u32>(row));
        patch_tokens.push_back(static_cast<u32>(token));
      }
    }
    patches = filled<float>(patch_rows.size(), uniform);
    numbers.patch_rows = patch_rows.data();
    numbers.patch_tokens = patch_tokens.data();
    numbers.patch_values = patches.get();
    numbers.num_patches = patch_rows.size();

    placement.num_heads = num_heads;
    placement.head_dim = head_dim;
    placement.first_token = below(num_tokens);
    placement.num_tokens = below(num_tokens - placement.first_token) + 1;
    placement.token_stride = static_cast<i64>(head_dim);
    placement.head_stride = static_cast<i64>(placement.num_tokens * head_dim);
    placement.num_rotated = below(2) * 2 * below(head_dim / 2 + 1);
    cos = filled<float>(placement.num_tokens * placement.num_rotated, uniform);
    sin = filled<float>(placement.num_tokens * placement.num_rotated, uniform);
    placement.cos = cos.get();
    placement.sin = sin.get();
    placement.cos_stride = placement.sin_stride = static_cast<i64>(placement.num_rotated);

    basis = filled<float>(num_heads * num_rows * head_dim, uniform);
    mean = filled<float>(num_heads * head_dim, uniform);
  }

  Reconstruction(const Reconstruction&) = delete;

  u64 size() const { return num_heads * placement.num_tokens * head_dim; }

  // On the host, with the kernels in use.
  void run(void* out, ElementType type) {
    placement.out = out;
    placement.type = type;
    run_transform(numbers, {basis.get(), mean.get()}, placement, 1);
  }
};

// Rows to attend, with the buffers of exactly the size that they need. Not to be moved.
struct Attending {
  u64 num_kv_heads = 1 + below(3);
  u64 group = 1 + below(4);
  u64 num_rows = 1 + below(below(2) ? 60 : 3);
  u64 num_keys = 1 + below(300);
  // Matrix units take channels by 32, and at least 64 of keys.
  bool is_even = below(4) == 0;
  // Wide heads are rare: sanitizers take long over them.
  u64 wider = below(8) == 0 ? 2 : 0;
  u64 key_dim = is_even ? 32 * (2 + below(1 + wider)) : 1 + below(below(2) ? 70 : 10);
  u64 value_dim = is_even ? 32 * (1 + below(2 + wider)) : 1 + below(below(2) ? 70 : 10);
  std::vector<i64> last_keys;
  std::unique_ptr<float[]> query, key, value, mass;
  Attention attention{};

  Attending() {
    mass = exactly<float>(num_kv_heads * num_keys);
    attention.mass = below(2) == 0 ? mass.get() : nullptr;
    attention.first_counted = below(num_rows + 1);
    attention.num_keys = num_keys;
    query = filled<float>(num_kv_heads * group * num_rows * key_dim, uniform);
    key = filled<float>(num_kv_heads * num_keys * key_dim, uniform);
    value = filled<float>(num_kv_heads * num_keys * value_dim, uniform);
    for (u64 row = 0; row < num_rows; ++row) last_keys.push_back(static_cast<i64>(below(num_keys)));
    std::sort(last_keys.begin(), last_keys.end());
    attention.num_rows = num_rows;
    attention.num_kv_heads = num_kv_heads;
    attention.group = group;
    attention.key_dim = key_dim;
    attention.value_dim = value_dim;
    attention.query_row_stride = attention.key_row_stride = static_cast<i64>(key_dim);
    attention.value_row_stride = static_cast<i64>(value_dim);
    attention.query_head_stride = static_cast<i64>(num_rows * key_dim);
    attention.key_head_stride = static_cast<i64>(num_keys * key_dim);
    attention.value_head_stride = static_cast<i64>(num_keys * value_dim);
    attention.last_keys = last_keys.data();
    attention.window = static_cast<i64>(1 + below(2 * num_keys));
    attention.scale = 1.0f;
    attention.softcap = below(2) == 0 ? 0.0f : 3.0f;
  }

  Attending(const Attending&) = delete;

  u64 size() const { return num_rows * num_kv_heads * group * value_dim; }

  void run(float* out, u32 threads) {
    attention.query = query.get();
    attention.key = key.get();
    attention.value = value.get();
    attention.out = out;
    attention.type = ElementType::f32;
    run_attention(attention, threads);
  }

  // The weights of a row and head sum to 1.
  void check_mass() const {
    if (attention.mass == nullptr) return;
    double total = 0;
    for (u64 i = 0; i < num_kv_heads * num_keys; ++i) total += attention.mass[i];
    const u64 counted = num_rows - std::min(num_rows, attention.first_counted);
    const u64 expected = num_kv_heads * group * counted;
    check(std::fabs(total - static_cast<double>(expected)) <= 1e-3, "weights do not sum to 1");
  }

  // With the upper halves of the floats as bfloat16.
  void run(u16* out, u32 threads) {
    const auto upper = [](const std::unique_ptr<float[]>& floats, u64 count) {
      auto found = exactly<u16>(count);
      for (u64 i = 0; i < count; ++i) found[i] = reconstruct::to_bf16(floats[i]);
      return found;
    };
    const auto queries = upper(query, num_kv_heads * group * num_rows * key_dim);
    const auto keys = upper(key, num_kv_heads * num_keys * key_dim);
    const auto values = upper(value, num_kv_heads * num_keys * value_dim);
    attention.query = queries.get();
    attention.key = keys.get();
    attention.value = values.get();
    attention.out = out;
    attention.type = ElementType::bf16;
    run_attention(attention, threads);
  }
};

}  // namespace kvrag::host

// The kernels without Python, for sanitizers and for processors that are emulated.
//
//     driver [rounds] [seed]
//
// Round trips, damaged payloads and reconstructions with every instruction set there is, in
// buffers of exactly the size the kernels may touch. Prints a hash of all payloads, which must
// be the same on every machine.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "model.h"
#include "payload.h"
#include "placement.h"

using namespace kvrag;
using namespace kvrag::host;

namespace {

std::mt19937_64 engine;

u64 below(u64 end) { return engine() % end; }

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", kernels().name, what.c_str());
  std::exit(1);
}

void check(bool condition, const char* what) {
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
    return {where, stride, classes.get(), contexts.get(), contexts ? stride : 0, num_rows,
            num_tokens};
  }
};

Matrix random_matrix(u64 num_rows, u64 num_tokens) {
  Matrix m;
  m.num_rows = num_rows;
  m.num_tokens = num_tokens;
  m.num_classes = 1 + below(4);
  const bool with_contexts = below(2) == 0;
  const u64 tables = m.num_classes + (with_contexts ? 2 : 0);
  m.frequencies.assign(tables * rans::kMaxSymbols, 0);
  for (u64 table = 0; table < tables; ++table) {
    u16* frequencies = &m.frequencies[table * rans::kMaxSymbols];
    u32 left = rans::kNumSlots;
    while (left > 0) {
      const u32 share = below(3) == 0 ? left : 1 + static_cast<u32>(below(left));
      frequencies[below(rans::kMaxSymbols)] += static_cast<u16>(share);
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

Model make_model(const Matrix& m) {
  return Model(m.frequencies.data(), m.frequencies.size() / rans::kMaxSymbols, rans::kMaxSymbols);
}

Failure decode(const Matrix& m, const Model& model, const std::vector<u8>& payload, u8* out) {
  const auto copy = exactly<u8>(payload.size());
  if (!payload.empty()) std::memcpy(copy.get(), payload.data(), payload.size());
  const std::vector<DecodeJob> jobs{{copy.get(), payload.size(), model.decode(), m.rows(out)}};
  return decode_payloads(jobs, 1).front();
}

// Whatever the bytes say: an answer, and no access outside the buffers.
void damage(const Matrix& m, const Model& model, std::vector<u8> payload, u8* out) {
  switch (below(4)) {
    case 0:
      payload.resize(below(payload.size() + 1));
      break;
    case 1:
      for (u64 i = below(8) + 1; i-- > 0;) payload[below(payload.size())] ^= 1u << below(8);
      break;
    case 2:
      for (u64 i = 4 + 4 * below(8); i < payload.size(); ++i) payload[i] = engine() & 0xff;
      break;
    default:
      payload.resize(payload.size() + 1 + below(200));
      break;
  }
  decode(m, model, payload, out);
}

u64 code(u64 hash) {
  const u64 num_rows = below(12);
  const Matrix m = random_matrix(num_rows, below(4) == 0 ? below(400) : below(70));
  const Model model = make_model(m);
  const u64 num_streams = 1 + below(m.num_rows == 0 ? 1 : m.num_rows);
  std::vector<u8> first;
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    const auto payload =
        encode_payload(m.rows<const u8>(m.symbols.get()), model.encode(), num_streams, 1);
    if (first.empty()) first = payload;
    check(payload == first, "another payload than the first instruction set's");
    const u64 size = m.num_rows * m.num_tokens;
    const auto out = exactly<u8>(size);
    check(decode(m, model, payload, out.get()).damage == Damage::none, "refused its own payload");
    check(size == 0 || std::memcmp(out.get(), m.symbols.get(), size) == 0, "other symbols");
    // The same damage for each, and the same numbers afterwards however many there are.
    const std::mt19937_64 before = engine;
    for (int i = 0; i < 4; ++i) damage(m, model, payload, out.get());
    engine = before;
  }
  for (const u8 byte : first) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

float uniform() { return static_cast<float>(below(20001)) / 10000.0f - 1.0f; }

template <class T, class Make>
std::unique_ptr<T[]> filled(u64 count, Make make) {
  auto found = exactly<T>(count);
  for (u64 i = 0; i < count; ++i) found[i] = make();
  return found;
}

void reconstruct_once() {
  const u64 num_heads = 1 + below(3);
  const u64 head_dim = below(2) ? 8 * (1 + below(17)) : 1 + below(40);
  const u64 num_tokens = 1 + below(80);
  const bool by_channel = below(2) == 0;
  const u64 num_rows = by_channel ? num_heads * head_dim : below(50);
  const u64 density = below(3);
  const auto number = [&] { return static_cast<i32>(below(3) < density ? below(255) : 127) - 127; };
  Numbers numbers{};
  const auto symbols = filled<u8>(num_rows * num_tokens, [&] { return number() + 128; });
  const auto values = filled<i16>(num_rows * num_tokens, [&] { return number() * 50; });
  if (below(2) == 0) {
    numbers.symbols = symbols.get();
  } else {
    numbers.values = values.get();
  }
  numbers.row_stride = static_cast<i64>(num_tokens);
  numbers.num_rows = num_rows;
  const auto shrink = filled<float>(num_rows, uniform);
  numbers.shrink = shrink.get();
  std::vector<u32> rows, tokens;
  for (u64 token = 0; token < num_tokens; ++token) {
    for (u64 row = 0; row < num_rows; ++row) {
      if (below(40) != 0) continue;
      rows.push_back(static_cast<u32>(row));
      tokens.push_back(static_cast<u32>(token));
    }
  }
  const auto patches = filled<float>(rows.size(), uniform);
  numbers.patch_rows = rows.data();
  numbers.patch_tokens = tokens.data();
  numbers.patch_values = patches.get();
  numbers.num_patches = rows.size();

  Placement placement{};
  placement.num_heads = num_heads;
  placement.head_dim = head_dim;
  placement.first_token = below(num_tokens);
  placement.num_tokens = below(num_tokens - placement.first_token) + 1;
  const u64 size = num_heads * placement.num_tokens * head_dim;
  placement.token_stride = static_cast<i64>(head_dim);
  placement.head_stride = static_cast<i64>(placement.num_tokens * head_dim);
  placement.num_rotated = below(2) * 2 * below(head_dim / 2 + 1);
  const auto cos = filled<float>(placement.num_tokens * placement.num_rotated, uniform);
  const auto sin = filled<float>(placement.num_tokens * placement.num_rotated, uniform);
  placement.cos = cos.get();
  placement.sin = sin.get();
  placement.cos_stride = placement.sin_stride = static_cast<i64>(placement.num_rotated);

  const auto basis = filled<float>(num_heads * num_rows * head_dim, uniform);
  const auto mean = filled<float>(num_heads * head_dim, uniform);
  const auto token_scale = filled<float>(num_tokens, uniform);
  const auto addend = filled<float>(num_rows * num_tokens, uniform);
  const Channels factors{shrink.get(), token_scale.get(), addend.get(),
                         static_cast<i64>(num_tokens)};
  std::vector<float> first;
  for (const Kernels* found : available_kernels()) {
    use_kernels(found->name);
    for (const ElementType type : {ElementType::bf16, ElementType::f16, ElementType::f32}) {
      const auto out = exactly<u8>(size * (type == ElementType::f32 ? 4 : 2));
      placement.out = out.get();
      placement.type = type;
      if (by_channel) {
        run_channels(numbers, factors, placement, 1);
      } else {
        run_transform(numbers, {basis.get(), mean.get()}, placement, 1);
      }
      if (type != ElementType::f32) continue;
      std::vector<float> written(size);
      std::memcpy(written.data(), out.get(), size * 4);
      if (first.empty()) first = written;
      for (u64 i = 0; i < size; ++i) {
        check(std::fabs(written[i] - first[i]) <= 0.5f, "another sum than the first's");
      }
    }
    auto finer = filled<i16>(values ? num_rows * num_tokens : 0, [] { return i16{-7}; });
    const auto context = exactly<u8>(num_rows * num_tokens);
    kernels().contexts(finer.get(), context.get(), num_rows * num_tokens);
    kernels().refine(finer.get(), symbols.get(), num_rows * num_tokens);
  }
}

// Several callers at a time, each with helpers from the pool.
void share_the_pool() {
  const Matrix m = random_matrix(200, 1000);
  const Model model = make_model(m);
  const Rows<const u8> rows = m.rows<const u8>(m.symbols.get());
  const auto payload = encode_payload(rows, model.encode(), 20, 1);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        check(encode_payload(rows, model.encode(), 20, 3) == payload, "threads change a payload");
        const auto out = exactly<u8>(m.num_rows * m.num_tokens);
        const std::vector<DecodeJob> jobs{
            {payload.data(), payload.size(), model.decode(), m.rows(out.get())}};
        check(decode_payloads(jobs, 3).front().damage == Damage::none, "threads find damage");
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main(int argc, char** argv) {
  const u64 rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300;
  engine.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  u64 hash = 14695981039346656037u;
  for (u64 round = 0; round < rounds; ++round) {
    hash = code(hash);
    reconstruct_once();
  }
  share_the_pool();
  std::string names;
  for (const Kernels* found : available_kernels()) names += std::string(" ") + found->name;
  std::printf("%llu rounds,%s: payloads %016llx\n", rounds, names.c_str(), hash);
}

// The GPU's kernels without a GPU, against the host's.
//
//     emulation [rounds] [seed]
//
// What this cannot show: speed, memory coalescing, and warps that drift apart where CUDA lets
// them.
#include "emulated_cuda.h"

// What `extern __shared__` declares.
float tile[32 * 257];

#include "../../../cuda/kernels/rans.cu"
#include "../../../cuda/kernels/reconstruct.cu"
#include "input.h"

using namespace kvrag::host;

namespace {

std::vector<u8> encode_emulated(const Matrix& m, const Model& model, u64 num_streams) {
  const auto scratch = exactly<u16>(m.num_rows * m.num_tokens);
  const auto states = exactly<u32>(num_streams * rans::kNumLanes);
  const auto num_words = exactly<i64>(num_streams);
  const i64 stride = static_cast<i64>(m.num_tokens);
  const unsigned num_blocks = static_cast<unsigned>(num_streams + 1) / 2;
  emulation::launch(num_blocks, 1, 64, [&] {
    rans_encode(m.symbols.get(), stride, m.classes.get(), m.contexts.get(), stride, model.encode(),
                model.num_classes, num_streams, m.num_rows, m.num_tokens, scratch.get(),
                states.get(), num_words.get());
  });
  std::vector<u64> offsets{4 + 4 * num_streams};
  std::vector<u32> index{static_cast<u32>(num_streams)};
  for (u64 i = 0; i < num_streams; ++i) {
    check(num_words[i] >= 0, "emulated encoder: a symbol of frequency 0");
    index.push_back(static_cast<u32>(rans::kStateBytes + 2 * num_words[i]));
    offsets.push_back(offsets.back() + index.back());
  }
  std::vector<u8> payload(offsets.back());
  std::memcpy(payload.data(), index.data(), 4 * index.size());
  emulation::launch(2, 1, 32, [&] {
    rans_pack(scratch.get(), states.get(), offsets.data(), num_streams, m.num_rows, m.num_tokens,
              payload.data());
  });
  return payload;
}

// The first stream's damage, as the host's decoder reports it.
i32 decode_emulated(const Matrix& m, const Model& model, const std::vector<u8>& payload, u8* out) {
  u32 num_streams;
  std::memcpy(&num_streams, payload.data(), 4);
  std::vector<u64> offsets{4 + 4 * u64{num_streams}};
  for (u64 i = 0; i < num_streams; ++i) {
    u32 size;
    std::memcpy(&size, payload.data() + 4 + 4 * i, 4);
    offsets.push_back(offsets.back() + size);
  }
  std::vector<i32> damage(num_streams, -1);
  const i64 stride = static_cast<i64>(m.num_tokens);
  emulation::launch((num_streams + 1) / 2, 1, 64, [&] {
    rans_decode(payload.data(), offsets.data(), num_streams, model.decode(), model.num_classes,
                m.classes.get(), m.contexts.get(), stride, out, stride, m.num_rows, m.num_tokens,
                damage.data());
  });
  for (const i32 found : damage) {
    if (found != 0) return found;
  }
  return 0;
}

void code() {
  const u64 num_rows = below(8);
  const Matrix m = random_matrix(num_rows, below(4) == 0 ? below(200) : below(70));
  const Model model = make_model(m);
  const u64 num_streams = 1 + below(m.num_rows == 0 ? 1 : m.num_rows);
  const auto expected =
      encode_payload(m.rows<const u8>(m.symbols.get()), model.encode(), num_streams, 1);
  auto payload = encode_emulated(m, model, num_streams);
  check(payload == expected, "emulated encoder: another payload than the host's");
  const u64 size = m.num_rows * m.num_tokens;
  const auto out = exactly<u8>(size);
  check(decode_emulated(m, model, payload, out.get()) == 0, "emulated decoder: damage");
  check(size == 0 || std::memcmp(out.get(), m.symbols.get(), size) == 0,
        "emulated decoder: other symbols");
  for (int round = 0; round < 2; ++round) {
    const u64 index_bytes = 4 + 4 * num_streams;
    payload[index_bytes + below(payload.size() - index_bytes)] ^= 1u << below(8);
    const std::vector<DecodeJob> jobs{
        {payload.data(), payload.size(), model.tables(), m.rows(out.get())}};
    const i32 found = static_cast<i32>(decode_payloads(jobs, 1).front().damage);
    check(decode_emulated(m, model, payload, out.get()) == found,
          "emulated decoder: other damage than the host finds");
  }
}

void reconstruct_once() {
  Reconstruction input;
  const Numbers& numbers = input.numbers;
  const void* matrix = numbers.symbols != nullptr ? static_cast<const void*>(numbers.symbols)
                                                  : static_cast<const void*>(numbers.values);
  const i64 number_type = numbers.symbols != nullptr ? 0 : 1;
  const u64 size = input.size();
  const auto expected = exactly<float>(size);
  input.run(expected.get(), ElementType::f32);
  const auto found = exactly<float>(size);
  const Placement& to = input.placement;
  if (input.by_channel) {
    const Channels& factors = input.factors;
    emulation::launch(
        static_cast<unsigned>((to.num_tokens + 31) / 32), static_cast<unsigned>(to.num_heads), 64,
        [&] {
          channels(matrix, number_type, numbers.row_stride, numbers.shrink, factors.row_scale,
                   factors.token_scale, factors.addend, factors.addend_stride, numbers.patch_rows,
                   numbers.patch_tokens, numbers.patch_values, numbers.num_patches, to.first_token,
                   to.num_tokens, to.head_dim, to.cos, to.cos_stride, to.sin, to.sin_stride,
                   to.num_rotated, found.get(), 0, to.head_stride, to.token_stride);
        });
  } else {
    const u64 n = to.num_tokens;
    const auto points = exactly<float>(input.num_rows * n);
    emulation::launch(2, 1, 32, [&] {
      dequantise(matrix, number_type, numbers.row_stride, numbers.shrink, input.num_rows,
                 to.first_token, n, points.get(), 0, static_cast<i64>(n));
    });
    emulation::launch(2, 1, 32, [&] {
      patch(numbers.patch_rows, numbers.patch_tokens, numbers.patch_values, numbers.num_patches,
            input.num_rows, to.first_token, n, points.get(), 0, static_cast<i64>(n));
    });
    const auto product = exactly<float>(size);
    for (u64 head = 0; head < input.num_heads; ++head) {
      for (u64 row = 0; row < input.num_rows; ++row) {
        for (u64 i = 0; i < n * input.head_dim; ++i) {
          product[head * n * input.head_dim + i] +=
              points[row * n + i / input.head_dim] *
              input.basis[(head * input.num_rows + row) * input.head_dim + i % input.head_dim];
        }
      }
    }
    emulation::launch(2, 1, 32, [&] {
      place(product.get(), input.mean.get(), input.num_heads, n, input.head_dim, to.cos,
            to.cos_stride, to.sin, to.sin_stride, to.num_rotated, found.get(), 0, to.head_stride,
            to.token_stride);
    });
  }
  check_close(found.get(), expected.get(), size, "emulated: another sum than the host's");
}

}  // namespace

int main(int argc, char** argv) {
  const u64 rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20;
  engine.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  for (u64 round = 0; round < rounds; ++round) {
    code();
    reconstruct_once();
  }
  std::printf("%llu rounds of the GPU's kernels, emulated\n", rounds);
}

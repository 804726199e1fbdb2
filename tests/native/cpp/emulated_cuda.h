// As much of CUDA as the kernels use, played by the host's threads: what a block's threads do
// at a barrier or a vote is what they do on a GPU, and a sanitizer sees when they race.
#pragma once

#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#include "kvrag/common.h"

#define __global__
#define __device__
#define __shared__

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Warp {
  std::barrier<> barrier{32};
  unsigned votes[32] = {};
};

struct Block {
  explicit Block(unsigned num_threads) : barrier(num_threads), warps(num_threads / 32) {}
  std::barrier<> barrier;
  std::vector<Warp> warps;
};

inline thread_local Block* block = nullptr;

// Run `kernel` once a thread of grid (x, y), one block after the other.
template <class Kernel>
void launch(unsigned grid_x, unsigned grid_y, unsigned num_threads, const Kernel& kernel) {
  for (unsigned i = 0; i < grid_x * grid_y; ++i) {
    Block shared(num_threads);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        threadIdx = {t, 0, 0};
        blockIdx = {i % grid_x, i / grid_x, 0};
        blockDim = {num_threads, 1, 1};
        gridDim = {grid_x, grid_y, 1};
        block = &shared;
        kernel();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace emulation

inline void __syncthreads() { emulation::block->barrier.arrive_and_wait(); }

inline unsigned __ballot_sync(unsigned, bool vote) {
  emulation::Warp& warp = emulation::block->warps[threadIdx.x / 32];
  warp.votes[threadIdx.x % 32] = vote;
  warp.barrier.arrive_and_wait();
  unsigned mask = 0;
  for (unsigned lane = 0; lane < 32; ++lane) mask |= warp.votes[lane] << lane;
  warp.barrier.arrive_and_wait();
  return mask;
}

inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

inline int __popc(unsigned mask) { return __builtin_popcount(mask); }

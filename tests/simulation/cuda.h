// CUDA on the host, as far as kernels/cuda needs it: one block at a time, each of its threads a fiber.
//
// Whatever a warp or a block does together is a meeting: all arrive, the last one does the work, all
// go on. A kernel whose threads wait for what never comes stops with a message.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#undef INT8_MAX  // rows.cuh has its own

#define __CUDA_ARCH__ 800  // the oldest: conversions in arithmetic
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

using std::max;
using std::min;

struct Index {
  unsigned x;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
template <typename T>
T __ldg(const T* source) {
  return *source;
}

// ------------------------------------------------------------------------------------------ threads
inline Index threadIdx, blockIdx, gridDim;
inline char* shared_memory;  // dynamic
inline unsigned shared_bytes;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "simulation: %s, thread %u of block %u\n", what, threadIdx.x, blockIdx.x);
  abort();
}

struct Fiber {
  ucontext_t context;
  bool done;
};
inline std::vector<Fiber> fibers;
inline std::vector<char> stacks;
inline ucontext_t scheduler;
inline long rounds_without_progress;
inline unsigned blocks_begun;

inline void wait_a_round() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

struct Meeting {
  unsigned arrived = 0, held = 0;
};
inline Meeting meeting_of_warp[32], meeting_of_block;

template <typename Work>
void meet(Meeting& meeting, unsigned members, Work work) {
  const unsigned held = meeting.held;
  if (++meeting.arrived == members) {
    work();
    meeting.arrived = 0;
    ++meeting.held;
    rounds_without_progress = 0;
  }
  while (meeting.held == held) wait_a_round();
}

// What the lanes of a warp bring to a meeting and take from it.
struct Desk {
  unsigned in[16], out[16];
};
inline Desk desks[32][32];
inline unsigned lane_id() { return threadIdx.x % 32; }

// `work` gets the desks of the warp's lanes.
template <typename Work>
void meet_warp(Work work) {
  Desk(&warp)[32] = desks[threadIdx.x / 32];
  meet(meeting_of_warp[threadIdx.x / 32], 32, [&] { work(warp); });
}
inline Desk& my_desk() { return desks[threadIdx.x / 32][lane_id()]; }

inline void __syncthreads() {
  meet(meeting_of_block, fibers.size(), [] {});
}
inline int block_votes, block_verdict;
inline int __syncthreads_count(bool x) {
  block_votes += x;
  meet(meeting_of_block, fibers.size(), [] { block_verdict = block_votes, block_votes = 0; });
  const int verdict = block_verdict;
  __syncthreads();  // nobody votes again before all have read
  return verdict;
}
inline bool __syncthreads_or(bool x) { return __syncthreads_count(x); }
inline void __syncwarp() {
  meet_warp([](Desk(&)[32]) {});
}

template <typename T>
T __shfl_sync(unsigned, T x, int source) {
  my_desk().in[0] = bits_of<unsigned>(x);
  my_desk().in[1] = source & 31;
  meet_warp([](Desk(&warp)[32]) {
    for (Desk& desk : warp) desk.out[0] = warp[desk.in[1]].in[0];
  });
  return bits_of<T>(my_desk().out[0]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  return __shfl_sync(mask, x, lane_id() ^ distance);
}
inline bool __any_sync(unsigned, bool x) {
  my_desk().in[0] = x;
  meet_warp([](Desk(&warp)[32]) {
    unsigned any = 0;
    for (Desk& desk : warp) any |= desk.in[0];
    for (Desk& desk : warp) desk.out[0] = any;
  });
  return my_desk().out[0];
}

// ------------------------------------------------------------------------------------------ launches
inline void (*kernel)();

inline void run_fiber() {
  kernel();
  fibers[threadIdx.x].done = true;
  wait_a_round();
}

inline void run_block(unsigned threads) {
  constexpr size_t STACK = 1 << 18;
  ++blocks_begun;
  fibers.assign(threads, {});
  stacks.resize(threads * STACK);
  for (unsigned i = 0; i < threads; ++i) {
    ucontext_t& context = fibers[i].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.data() + i * STACK;
    context.uc_stack.ss_size = STACK;
    makecontext(&context, run_fiber, 0);
  }
  rounds_without_progress = 0;
  for (bool running = true; running;) {
    running = false;
    if (++rounds_without_progress > 100000) fail("the block hangs");
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].done) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
      running = running || !fibers[i].done;
    }
  }
}

inline void run_grid(void (*entry)(), unsigned blocks, unsigned threads, unsigned shared) {
  kernel = entry;
  shared_bytes = shared;
  gridDim.x = blocks;
  shared_memory = static_cast<char*>(aligned_alloc(1024, (shared / 1024 + 1) * 1024));
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    memset(shared_memory, 0xff, shared);  // NaN, wherever it is read before it is written
    run_block(threads);
  }
  free(shared_memory);
}

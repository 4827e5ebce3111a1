// Shared memory of INT8 attention on compute capability 9.0.
#pragma once

#include "int8_layout.cuh"
#include "pipeline.cuh"

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int GROUP_ROWS = 64;  // of Q
constexpr int CONSUMERS = 3;    // warpgroups
constexpr int ROWS = CONSUMERS * GROUP_ROWS;
constexpr int KEYS = 128;  // of a tile
constexpr int BLOCKS = KEYS / BLOCK_KEYS;

// What the warpgroups share: Q, tiles of K and V, V's scales and offsets, and barriers that say who may
// touch them when.
template <int HEAD_DIM, int STAGES>
struct Shared {
  static constexpr int TILE = KEYS * HEAD_DIM;
  static constexpr int SCALES = BLOCKS * SCALES_PER_BLOCK * 4;  // bytes
  static constexpr int K = ROWS * HEAD_DIM;
  static constexpr int V = K + STAGES * TILE;
  static constexpr int K_SCALES = V + STAGES * TILE;
  static constexpr int V_CHANNELS = K_SCALES + STAGES * SCALES;
  static constexpr int V_CHANNELS_BYTES = 2 * HEAD_DIM * 4;
  static constexpr int BARRIERS = V_CHANNELS + V_CHANNELS_BYTES;
  static_assert(HEAD_DIM * 127 * 127 < MAGIC_RANGE / 2, "differences of scores must fit MAGIC");
  static_assert(KEYS * 255 * 255 < DENORMAL_RANGE, "products P V must be denormal");

  u32 address;

  __device__ __forceinline__ u32 q(int group) const {
    return address + group * (GROUP_ROWS * HEAD_DIM);
  }
  __device__ __forceinline__ u32 k(int stage) const { return address + K + stage * TILE; }
  __device__ __forceinline__ u32 v(int stage) const { return address + V + stage * TILE; }
  __device__ __forceinline__ u32 k_scales(int stage) const {
    return address + K_SCALES + stage * SCALES;
  }
  __device__ __forceinline__ u32 v_channels() const { return address + V_CHANNELS; }
  __device__ __forceinline__ Barrier full_k(int stage) const { return barrier(stage, 0); }
  __device__ __forceinline__ Barrier full_v(int stage) const { return barrier(stage, 1); }
  __device__ __forceinline__ Barrier empty_k(int stage) const { return barrier(stage, 2); }
  __device__ __forceinline__ Barrier empty_v(int stage) const { return barrier(stage, 3); }

  // By one thread, before a __syncthreads().
  __device__ __forceinline__ void start() const {
    for (int stage = 0; stage < STAGES; ++stage) {
      full_k(stage).init(1), full_v(stage).init(1);
      empty_k(stage).init(CONSUMERS * GROUP), empty_v(stage).init(CONSUMERS * GROUP);
    }
    publish_barriers();
  }

 private:
  __device__ __forceinline__ Barrier barrier(int stage, int i) const {
    return {address + BARRIERS + (4 * stage + i) * 8};
  }
};

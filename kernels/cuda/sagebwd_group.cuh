// What warpgroups of SageBwd have in common: 64 rows, queries or keys, against one tile of the
// other side after the other, by wgmma. Of its warp's 16 rows a lane holds two.
#pragma once

#include "sagebwd_group_tiles.cuh"
#include "sagebwd_rows.cuh"
#include "wgmma.cuh"

constexpr int GROUP = 128;  // threads of a warpgroup

constexpr int PRODUCER_REGISTERS = 24;
template <int CONSUMERS>
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;

constexpr int PAIRS = TILE_TOKENS / 16;  // of eights of columns: a pair is 16 tokens

// Which consumer this thread is of. The compiler learns that a warp is of one alone.
__device__ __forceinline__ int consumer() {
  return __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0) - 1;
}
__device__ __forceinline__ int lane_of_quad() { return threadIdx.x % 4; }
__device__ __forceinline__ int quad_of_warp() { return threadIdx.x % 32 / 4; }

// A lane's row `r`, as a row of its tile and as the token that lies there.
__device__ __forceinline__ int tile_row(int r) {
  return threadIdx.x / 32 % 4 * 16 + quad_of_warp() + 8 * r;
}
__device__ __forceinline__ int token_of_row(int r) {
  return threadIdx.x / 32 % 4 * 16 + quad_of_warp() / 2 * 4 + 2 * r + quad_of_warp() % 2;
}

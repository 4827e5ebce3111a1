// How quantised Q, K and V lie in global and in shared memory: one place for writers and readers.
//
// Q codes: row-major [B, Hq, Nq, HEAD_DIM]. K and V codes: blocks of 64 keys, [B, Hk, blocks]; a
// block of K is [HEAD_DIM / 32][64 rows][32 channels], one of V [2][HEAD_DIM rows][32 keys]
// (transposed: 8-bit matrix products need the reduced dimension contiguous). Both are made of
// 32-byte rows whose two 16-byte halves change places in rows with bit 2 set; so the eight rows of
// any ldmatrix cover all 32 banks, for every HEAD_DIM, and a block is copied as it is.
//
// Where a tile is 128 keys, as for wgmma, two blocks of K lie together, [HEAD_DIM / 32][128 rows][32
// channels], so that a panel holds all rows of a product.
//
// Row 16n + 8j + 2t + e of a block of K holds key 16n + 4t + 2j + e (j, e < 2; t, n < 4). Lane t of
// a quad thus gets the scores of four neighbouring keys of each 16, in the order in which the
// product with V wants their probabilities: P never moves between lanes.
//
// Scale of K: one per block and t, [B, Hk, blocks][4], shared by the 16 keys that a lane holds
// (SageAttention2, section 3.2, calls it per-thread quantisation).
#pragma once

#include "panels.cuh"

constexpr int BLOCK_KEYS = 64;
constexpr int SCALES_PER_BLOCK = 4;
constexpr float LARGEST_FACTOR = 1e30f;  // of a score: times any integer score it is still finite

// Row of a block of K that holds key `key` (0..63).
__device__ __forceinline__ int row_of_key(int key) {
  int t = key / 4 % 4, j = key / 2 % 2, e = key % 2;
  return key / 16 * 16 + 8 * j + 2 * t + e;
}

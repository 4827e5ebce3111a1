// How quantised Q, K and V lie in global and in shared memory: one place for writers and readers.
//
// Q codes: row-major [B, Hq, Nq, HEAD_DIM]. K and V codes: blocks of 64 keys, [B, Hk, blocks]; a
// block of K is [HEAD_DIM / 32][64 rows][32 channels], one of V [2][HEAD_DIM rows][32 keys]
// (transposed: 8-bit matrix products need the reduced dimension contiguous). Both are made of
// 32-byte rows whose two 16-byte halves change places in rows with bit 2 set; so the eight rows of
// any ldmatrix cover all 32 banks, for every HEAD_DIM, and a block is copied as it is.
//
// Row 16n + 8j + 2t + e of a block of K holds key 16n + 4t + 2j + e (j, e < 2; t, n < 4). Lane t of
// a quad thus gets the scores of four neighbouring keys of each 16, in the order in which the
// product with V wants their probabilities: P never moves between lanes.
//
// Scale of K: one per block and t, [B, Hk, blocks][4], shared by the 16 keys that a lane holds
// (SageAttention2, section 3.2, calls it per-thread quantisation).
#pragma once

#include "types.cuh"

constexpr int BLOCK_KEYS = 64;
constexpr int SCALES_PER_BLOCK = 4;

// Byte of (row, byte) in a panel of 32-byte rows.
__device__ __forceinline__ int panel_offset(int row, int byte) {
  return row * 32 + (byte ^ ((row & 4) << 2));
}

// Row of a block of K that holds key `key` (0..63).
__device__ __forceinline__ int row_of_key(int key) {
  int t = key / 4 % 4, j = key / 2 % 2, e = key % 2;
  return key / 16 * 16 + 8 * j + 2 * t + e;
}

// What lane `lane` adds to the address of 16 rows of a panel for ldmatrix_x4, which then gives
// b0, b1 of rows 0..7 in r[0], r[1] and of rows 8..15 in r[2], r[3].
__device__ __forceinline__ int ldmatrix_offset(int lane) {
  return panel_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);
}

// How NVFP4 Q, K and V lie in global and in shared memory: one place for writers and readers.
//
// A word holds eight E2M1 codes, the first in its lowest nibble. A scale, E4M3, belongs to sixteen
// values: of neighbouring channels of a token in Q and K, of neighbouring keys of a channel in V.
// K_DIM is HEAD_DIM rounded up to the 64 channels of a matrix product; zeros fill it.
//
// Q: codes [B, Hq, Nq][K_DIM / 2 bytes] and scales [B, Hq, Nq][K_DIM / 16], row-major.
// K and V: [B, Hk, blocks] of 64 keys each, in one piece so that one copy brings it:
//   codes of K   [K_DIM / 64 panels][64 rows][32 bytes]
//   codes of V   [HEAD_DIM rows][32 bytes], transposed: products reduce over contiguous values
//   scales of K  [64 rows][K_DIM / 16]
//   scales of V  [HEAD_DIM rows][4]
// Panels: see panels.cuh.
//
// Where Q and K are in INT8 (precision int8_fp4), Q is [B, Hq, Nq][HEAD_DIM] with an FP32 scale per
// query, a block's codes of K are [HEAD_DIM / 32 panels][64 rows][32 bytes], and its scales of K four
// FP32 numbers in 128 bytes: number t is that of the sixteen keys whose scores lane t of a quad gets.
//
// Row 32n + 8j + 2t + e of a block of K holds key 32n + 8t + 2j + e (n, e < 2; j, t < 4). Lane t of a
// quad thus gets the scores of eight neighbouring keys of each 32, which is the operand that the
// product with V wants from it: P never moves between lanes.
//
// What smoothing takes from Q comes back as scores [q_blocks][blocks][32 pairs of rows][4]: those of
// rows 2i and 2i + 1 of a block of K, twice, as an accumulator holds them for its two query rows.
#pragma once

#include "panels.cuh"

constexpr int BLOCK_KEYS = 64;

// Row of a block of K that holds key `key` (0..63).
__device__ __forceinline__ int row_of_key(int key) {
  const int t = key / 8 % 4, j = key / 2 % 4, e = key % 2;
  return key / 32 * 32 + 8 * j + 2 * t + e;
}

// Bytes from the start of a block.
template <int HEAD_DIM, int K_CODE_BYTES, int K_SCALE_BYTES>
struct KvParts {
  static constexpr int V_CODES = K_CODE_BYTES;
  static constexpr int K_SCALES = V_CODES + HEAD_DIM * 32;
  static constexpr int V_SCALES = K_SCALES + K_SCALE_BYTES;
  static constexpr int BYTES = V_SCALES + HEAD_DIM * 4;
  static_assert(BYTES % 128 == 0, "blocks must keep the alignment that ldmatrix and copies want");
};

constexpr int PANEL = BLOCK_KEYS * 32;  // bytes of 64 channels of K in FP4, of 32 in INT8

template <int HEAD_DIM>
constexpr int PADDED_DIM = (HEAD_DIM + 63) / 64 * 64;

template <int HEAD_DIM>
struct KvBlock
    : KvParts<HEAD_DIM, PADDED_DIM<HEAD_DIM> / 64 * PANEL, BLOCK_KEYS * PADDED_DIM<HEAD_DIM> / 16> {
  static constexpr int K_DIM = PADDED_DIM<HEAD_DIM>;
  static constexpr int K_SCALE_ROW = K_DIM / 16;
};

template <int HEAD_DIM>
struct Int8KvBlock : KvParts<HEAD_DIM, HEAD_DIM / 32 * PANEL, 128> {};

// Bytes of the smoothed-away scores of one block of keys.
constexpr int DELTA_BYTES = BLOCK_KEYS / 2 * 16;

// dS of 64 queries and 64 keys on its way through memory, from the kernel of dK and dV, which has
// it as bytes, to that of dQ: one place for writer and reader.
//
// CODES    of dS times a scale of each query (SLOPE), [4 times 16 queries][4 times 16 keys]
//          [32 lanes][8 bytes], as dQ's lanes hold them: lane 4g + t has query rows g and g + 8, a
//          word each, of key rows 2t, 2t + 8, 2t + 1, 2t + 9. Rows are a tile's (row_of_key).
// WEIGHTS  in BF16, [64 key rows]: what a code is worth times a code of K
#pragma once

#include "sagebwd_group.cuh"

using RowBytes = u32[2][PAIRS];  // this lane's tokens of its two rows

struct DsTile {
  static constexpr int CODES = 0, WEIGHTS = TILE_TOKENS * TILE_TOKENS;
  static constexpr int BYTES = WEIGHTS + TILE_TOKENS * 2;
};

// Bytes on their way out, one key's beside the other's, of two neighbouring queries a word.
using DsWords = u32[2 * PAIRS];

// bytes: of rows of keys, of which each 16 columns are four neighbouring queries.
__device__ __forceinline__ void pair_keys(DsWords& words, const RowBytes& bytes) {
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    words[2 * pair] = permute_bytes(bytes[0][pair], bytes[1][pair], 0x5140);
    words[2 * pair + 1] = permute_bytes(bytes[0][pair], bytes[1][pair], 0x7362);
  }
}

// To `tile` in memory, by a whole warpgroup. weight: of this lane's keys, the scale of K in it.
__device__ __forceinline__ void store_ds(u8* tile, const DsWords& words,
                                         const float (&weight)[2]) {
  const int chunk = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    *reinterpret_cast<uint2*>(tile + DsTile::CODES + ((pair * 4 + chunk) * 32 + lane) * 8) =
        make_uint2(transpose_16bit(words[2 * pair]), transpose_16bit(words[2 * pair + 1]));
  }
  if (lane_of_quad() == 0) {
    u16* weights = reinterpret_cast<u16*>(tile + DsTile::WEIGHTS);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weights[tile_row(r)] = static_cast<u16>(pack_bf16x2(weight[r], 0.0f));
    }
  }
}

// dS of this warp's 16 queries and `chunk`'s 16 keys from the tile at shared address `tile`, times
// the weights, as the first operand of a product in BF16.
__device__ __forceinline__ void load_ds(u32 (&a)[4], u32 tile, int chunk) {
  const int pair = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  u32 bytes[2];
  load_shared_words(bytes, tile + DsTile::CODES + ((pair * 4 + chunk) * 32 + lane) * 8);
  const u32 weights = tile + DsTile::WEIGHTS + (16 * chunk + 2 * lane_of_quad()) * 2;
  const u32 low = load_shared_word(weights), high = load_shared_word(weights + 8 * 2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    a[r] = multiply_bf16x2(bf16x2_of_bytes<0, 2>(bytes[r]), low);
    a[2 + r] = multiply_bf16x2(bf16x2_of_bytes<1, 3>(bytes[r]), high);
  }
}

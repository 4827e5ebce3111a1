// Products of a warpgroup that holds 64 keys and goes through queries. What they are and how they
// are scaled: sagebwd_warp.cuh.
//
// Of its warp's 16 rows a lane holds two, of each 16 columns four neighbouring tokens. While the
// tensor cores are at one product, the warpgroup brings the one before into FP32.
#pragma once

#include "sagebwd_group_ds.cuh"

// Bytes of a tile that a consumer keeps of its rows: codes and values.
template <int HEAD_DIM>
constexpr int OWN_BYTES = TileParts<HEAD_DIM>::END;

// What wgmma gives a lane: integers, of 64 tokens (scores) or of 64 channels, or bits of floats (dP).
// One type, so that they can take each other's registers, of which wgmma wants 32 in a row.
using Product = u32[TILE_TOKENS / 2];
using RowTokens = float[2][4 * PAIRS];   // this lane's tokens of its two rows

// In a lane's Product over tokens: row r, token 16 * pair + 4t + i.
__device__ __forceinline__ constexpr int place_of(int r, int pair, int i) {
  return (2 * pair + i / 2) * 4 + 2 * r + i % 2;
}

// S and dP: begin the products of the rows' tile and another one, at shared addresses `own` and
// `other`.
template <int HEAD_DIM>
__device__ __forceinline__ void multiply_codes(Product& s, u32 own, u32 other) {
  const WgmmaOperand a = WgmmaOperand::panel(own) + TileParts<HEAD_DIM>::CODES;
  const WgmmaOperand b = WgmmaOperand::panel(other) + TileParts<HEAD_DIM>::CODES;
  wgmma_begin();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 32; ++step) {
    wgmma_s8(s, a + step * CODE_PANEL, b + step * CODE_PANEL, step > 0);
  }
  wgmma_commit();
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void multiply_values(Product& d_p, u32 own, u32 other) {
  const WgmmaOperand a = WgmmaOperand::wide_panel(own) + TileParts<HEAD_DIM>::VALUES;
  const WgmmaOperand b = WgmmaOperand::wide_panel(other) + TileParts<HEAD_DIM>::VALUES;
  wgmma_begin();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    const int offset = step / 4 * VALUE_PANEL + step % 4 * 32;
    wgmma_16bit<DTYPE>(d_p, a + offset, b + offset, step > 0);
  }
  wgmma_commit();
}

// Begins the product of rows' bytes and transposed codes of the tile at shared address `other`, for 64
// channels from 64 * part on.
template <int HEAD_DIM>
__device__ __forceinline__ void multiply_tokens(Product& product, const RowBytes& rows,
                                                u32 other, int part) {
  wgmma_begin();
#pragma unroll
  for (int step = 0; step < PAIRS / 2; ++step) {
    const u32 a[4] = {rows[0][2 * step], rows[1][2 * step], rows[0][2 * step + 1],
                      rows[1][2 * step + 1]};
    const WgmmaOperand b = WgmmaOperand::panel(other) + QueryTile<HEAD_DIM>::TRANSPOSED +
                           step * (HEAD_DIM * 32) + part * (64 * 32);
    wgmma_s8(product, a, b, step > 0);
  }
  wgmma_commit();
}

// sums += weight * product, for the same channels.
template <int HEAD_DIM>
__device__ __forceinline__ void add(float (&sums)[HEAD_DIM / 8][4], const Product& product,
                                    const float (&weight)[2], int part) {
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 2; ++i) {
    float& sum = sums[8 * part + i / 4][i % 4];
    sum = fmaf(static_cast<float>(static_cast<s32>(product[i])), weight[i / 2 % 2], sum);
  }
}

// sums += weight * (bytes times the codes of the tile of `turn`), and under way S and dP of `own` and
// the tile of `next`, of which S has come when this returns. d_p is free to use until then.
// store() is called while the first product is under way, which has `bytes` to itself then;
// prefetch(address of that tile) before products of it are.
template <int HEAD_DIM, Dtype DTYPE, typename Ring, int STAGES, typename Store,
          typename Prefetch>
__device__ __forceinline__ void add_and_go_on(float (&sums)[HEAD_DIM / 8][4], Product& s,
                                              Product& d_p, const RowBytes& bytes,
                                              const float (&weight)[2], u32 own, const Ring& ring,
                                              const Turn<STAGES>& turn, const Turn<STAGES>& next,
                                              Store store, Prefetch prefetch) {
  constexpr int PARTS = HEAD_DIM / 64;
  const u32 tile = ring.tile(turn.stage);
  if constexpr (PARTS == 2) multiply_tokens<HEAD_DIM>(s, bytes, tile, 0);
  multiply_tokens<HEAD_DIM>(d_p, bytes, tile, PARTS - 1);
  store();
  if constexpr (PARTS == 2) {
    wgmma_wait<1>();
    pin(s);
    add<HEAD_DIM>(sums, s, weight, 0);
  }
  ring.full(next.stage).wait(next.parity);
  prefetch(ring.tile(next.stage));
  multiply_codes<HEAD_DIM>(s, own, ring.tile(next.stage));
  wgmma_wait<1>();
  pin(d_p);
  add<HEAD_DIM>(sums, d_p, weight, PARTS - 1);
  ring.empty(turn.stage).arrive();
  multiply_values<HEAD_DIM, DTYPE>(d_p, own, ring.tile(next.stage));
  wgmma_wait<1>();
  pin(s);
}

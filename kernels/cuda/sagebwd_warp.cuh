// What a warp of SageBwd does: sixteen rows, queries or keys, against one tile of the other side
// after the other.
//
// S = Q K^T is the forward pass's own: the same codes, hence the same integers. With the forward
// pass's log-sum-exp it gives P again, and with dP = dO V^T in 16 bits dS = P (dP - D).
//
// A product that sums over tokens cannot take their scales out of the sum. So what it multiplies by
// takes them in before it is quantised itself: P the scales of dO, dS those of Q or of K. It then
// gets one scale per row and tile of 32 tokens. Sums over tiles are in FP32, as every scale differs.
#pragma once

#include "mask.cuh"
#include "sagebwd_rows.cuh"
#include "sagebwd_tile.cuh"

constexpr int WARP_ROWS = 16;

// SHARED: the rows stay in shared memory, where registers are short.
template <int HEAD_DIM, Dtype DTYPE, bool SHARED = false>
struct BackwardRows {
  using Sums = float[HEAD_DIM / 8][4];
  using Tile = u32[TILE_TOKENS / 8][4];  // scores of 16 rows and a tile, beside MAGIC
  using Values = float[TILE_TOKENS / 8][4];
  static constexpr int PAIRS = TILE_TOKENS / 16;  // of n-tiles: a pair is 16 tokens
  static constexpr int CODE_STEPS = HEAD_DIM / 32, VALUE_STEPS = HEAD_DIM / 16;
  static constexpr int STEPS = CODE_STEPS + VALUE_STEPS;
  static constexpr int PANEL = WARP_ROWS * 32;                    // bytes of a step
  static constexpr int SHARED_BYTES = SHARED ? STEPS * PANEL : 0;  // of a warp
  static_assert(HEAD_DIM * 127 * 127 < MAGIC_RANGE, "scores must fit beside MAGIC");

  // Of both products, step by step: codes of Q or K as mma_s8_s8 takes them, then dO or V as
  // mma_16bit does. Either takes 32 bytes of each row.
  u32 steps[SHARED ? 1 : STEPS][4];
  u32 shared_steps;  // shared address for this lane's ldmatrix

  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }
  static __device__ __forceinline__ int lane_row(int r) { return 8 * r + threadIdx.x % 32 / 4; }

  // codes(r, step, half): word t() of this half of a step, of row r (0 or 1) of this lane. source: of
  // dO or V, whose row past the end repeats the last one. shared: this warp's SHARED_BYTES.
  template <typename Codes>
  __device__ __forceinline__ void load(Codes codes, const Tensor& source, int batch, int head,
                                       int first, int end, int head_dim, u8* shared) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* row = source.token<DTYPE>(batch, head, min(first + lane_row(r), end - 1));
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        const int step = i / 2, half = i % 2;
        const int channel = 8 * (i - 2 * CODE_STEPS);  // head_dim is a multiple of 8
        u32 word = 0;
        if (step < CODE_STEPS) {
          word = codes(r, step, half);
        } else if (channel < head_dim) {
          word = *reinterpret_cast<const u32*>(row + (channel + 2 * t()) * 2);
        }
        if constexpr (SHARED) {
          const int byte = panel_offset(lane_row(r), 16 * half + 4 * t());
          *reinterpret_cast<u32*>(shared + step * PANEL + byte) = word;
        } else {
          steps[step][2 * half + r] = word;
        }
      }
    }
    if constexpr (SHARED) {
      // Matrices in the order of A: rows 0..7 and 8..15, then their second halves.
      const int lane = threadIdx.x % 32;
      shared_steps = shared_address_of(shared) + panel_offset(lane % 16, lane / 16 * 16);
      __syncwarp();
    }
  }

  // s = Q K^T or K Q^T, beside MAGIC. `tile`: shared address of its scores plus this lane's offset.
  __device__ __forceinline__ void multiply_codes(Tile& s, u32 tile) const {
    u32 magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
    for (int step = 0; step < CODE_STEPS; ++step) {
      u32 a[4];
      get(a, step);
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        u32 b[4];
        ldmatrix_x4(b, tile + step * TILE_PANEL + pair * (16 * 32));
        mma_s8_s8(s[2 * pair], a, b[0], b[1], step ? s[2 * pair] : magic);
        mma_s8_s8(s[2 * pair + 1], a, b[2], b[3], step ? s[2 * pair + 1] : magic);
      }
    }
  }

  // d_p = dO V^T or V dO^T. `tile`: shared address of its values plus this lane's offset.
  __device__ __forceinline__ void multiply_values(Values& d_p, u32 tile) const {
#pragma unroll
    for (int n = 0; n < TILE_TOKENS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d_p[n][i] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step) {
      u32 a[4];
      get(a, CODE_STEPS + step);
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        u32 b[4];
        ldmatrix_x4(b, tile + step * TILE_PANEL + pair * (16 * 32));
        const u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
        mma_16bit<DTYPE>(d_p[2 * pair], a, low);
        mma_16bit<DTYPE>(d_p[2 * pair + 1], a, high);
      }
    }
  }

 private:
  __device__ __forceinline__ void get(u32 (&a)[4], int step) const {
    if constexpr (SHARED) {
      ldmatrix_x4(a, shared_steps + step * PANEL);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = steps[step][i];
    }
  }
};

// False if none of the warp's rows has anything but zeros (NaN is something): their product may be
// left out. `weight` and `levels` as above.
__device__ __forceinline__ bool has_weight(const float (&weight)[2], float levels) {
  const float zeros = SMALLEST_AMAX * (1.0f / levels);
  return __any_sync(0xffffffff, !(weight[0] <= zeros) || !(weight[1] <= zeros));
}

// sums += weight * (A B): A the bytes of two rows, B a transposed panel at shared address `panel`
// plus this lane's offset.
//
// The compiler would begin all products before it adds up the first, and 64 more registers are not
// there beside two gradients of 128 channels. It does not reach over a branch: here is one for
// `never`, which is false but not to its knowledge. Returns false then.
template <bool SIGNED, int HEAD_DIM>
__device__ __forceinline__ bool add_product(float (&sums)[HEAD_DIM / 8][4],
                                            const u32 (&rows)[2][TILE_TOKENS / 16],
                                            const float (&weight)[2], u32 panel,
                                            bool never = false) {
  static_assert(TILE_TOKENS * 255 * 127 < MAGIC_RANGE, "products must fit beside MAGIC");
  u32 magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
  const u32 a[4] = {rows[0][0], rows[1][0], rows[0][1], rows[1][1]};
#pragma unroll
  for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
    if (pair == 4 && never) return false;
    u32 b[4], product[2][4];
    ldmatrix_x4(b, panel + pair * (16 * 32));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (SIGNED) {
        mma_s8_s8(product[n], a, b[2 * n], b[2 * n + 1], magic);
      } else {
        mma_u8_s8(product[n], a, b[2 * n], b[2 * n + 1], magic);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[2 * pair + n][i];
        sum = fmaf(as_float(product[n][i]) - MAGIC, weight[i / 2], sum);
      }
    }
  }
  return true;
}

// What the mask adds to the exponents of four neighbouring columns of a row; -infinity hides.
__device__ __forceinline__ void read_mask(float (&bias)[4], const Mask& mask, s64 row, int column,
                                          int columns) {
  if (mask.dtype == BOOL) {
    const u32 visible = mask.visible(row, column, columns);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bias[i] = visible & 0xffu << (8 * i) ? 0.0f : as_float(NEGATIVE_INFINITY_BITS);
    }
  } else {
    mask.biases(bias, row, column, columns);
  }
}

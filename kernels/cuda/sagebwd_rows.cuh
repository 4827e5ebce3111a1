// Rows of P, dS and gradients as a lane of SageBwd holds them, whatever instruction multiplies them.
#pragma once

#include "output.cuh"
#include "rows.cuh"

constexpr float PROBABILITY_MAX = 255.0f;

// A row's 16 * PAIRS numbers of a tile, of which this lane holds a quarter: token 16 * pair + 4t + i
// in x[4 * pair + i], in units of this lane's `unit`. Returns them as bytes for a product that sums
// over tokens, and their scale. Numbers up to `levels` (127, either sign, or 255, none negative) fit.
template <int PAIRS>
__device__ __forceinline__ float quantise_row(u32 (&bytes)[PAIRS], const float (&x)[4 * PAIRS],
                                              float levels, float unit = 1.0f) {
  float most[4];  // so that no chain of maxima is long
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i] = fabsf(x[i]);
#pragma unroll
  for (int i = 4; i < 4 * PAIRS; ++i) most[i % 4] = max_nan(most[i % 4], fabsf(x[i]));
  float amax = max_nan(max_nan(most[0], most[1]), max_nan(most[2], most[3])) * unit;
  amax = max_over_quad(max_nan(amax, SMALLEST_AMAX));
  const float inverse = levels * reciprocal_approx(amax) * unit;
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    u32 b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = round_to_byte(x[4 * pair + i], inverse, MAGIC);
    bytes[pair] = pack_bytes(b[0], b[1], b[2], b[3]);
  }
  return amax * (1.0f / levels);
}

// Two rows of sums from the rotated channels, which the codes of Q and K are of, to the caller's.
// The matrix is its own inverse but for a factor, ROTATION_ROOT squared.
template <int HEAD_DIM>
__device__ __forceinline__ void rotate_back(float (&x)[HEAD_DIM / 8][4]) {
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float sum = x[n][i] + x[n][i + 1];
      x[n][i + 1] = x[n][i] - x[n][i + 1];
      x[n][i] = sum;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        const float other = __shfl_xor_sync(0xffffffff, x[n][i], distance);
        x[n][i] = threadIdx.x & distance ? other - x[n][i] : x[n][i] + other;
      }
    }
  }
#pragma unroll
  for (int bit = 1; bit < QuadRows<HEAD_DIM>::BLOCK / 8; bit *= 2) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      if (n & bit) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = x[n][i] + x[n | bit][i];
        x[n | bit][i] = x[n][i] - x[n | bit][i];
        x[n][i] = sum;
      }
    }
  }
}

// Two rows of a gradient, times `factor`, where there are such tokens and channels.
template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void store_rows(const Output& target, const float (&x)[HEAD_DIM / 8][4],
                                           float factor, int batch, int head,
                                           const int (&token)[2], int end, int head_dim) {
  const OutputRow<DTYPE> rows[2] = {target.row<DTYPE>(batch, head, token[0]),
                                    target.row<DTYPE>(batch, head, token[1])};
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int channel = 8 * n + threadIdx.x % 4 * 2;
      if (token[r] < end && channel < head_dim) {
        rows[r].store_unlimited(channel, x[n][2 * r] * factor, x[n][2 * r + 1] * factor);
      }
    }
  }
}

// Q and K of the query heads of one key head on their way to NVFP4: channels balanced, then rotated.
// Both leave Q K^T as it is.
//
// Balancing multiplies each channel of Q by a factor and divides it in K by the same, so that its
// half width is alike in both: a channel in which K is large and Q small would cost the other fifteen
// of its block in K their precision, and itself its own in Q. Rotation (a Hadamard matrix, as in
// rows.cuh) then spreads what is large in both over all blocks. Either alone does little or harm; by
// how much, docs/fp4.md.
#pragma once

#include "fp4_quantise.cuh"

// Of a channel's half width beside the widest of its head: below, it is taken as this.
constexpr float SMALLEST_WIDTH = 1.0f / 4096;
constexpr float SMALLEST_NORM = 1e-33f;  // NVFP4_MAX and a factor over it must stay finite

// What the blocks of threads that quantise Q and K know of all tokens.
struct Statistics {
  const float* q;   // [B, Hq, q_chunks, PARTIAL_FLOATS]
  const float* kv;  // [B, Hk, 2 (K, V), kv_chunks, PARTIAL_FLOATS]
  int q_chunks, kv_chunks;
};

template <int HEAD_DIM>
__device__ __forceinline__ float width_over_widest(float width, float (&per_warp)[THREADS / 32]) {
  const float widest = max_nan(max_over_block<THREADS>(width, per_warp), SMALLEST_NVFP4_AMAX);
  return max_nan(width / widest, SMALLEST_WIDTH);
}

// The factor of Q's channel threadIdx.x, and `k`: K in it; by all threads. `group`: query heads.
template <int HEAD_DIM>
__device__ __forceinline__ float find_balance(const Statistics& s, s64 kv_head, int group,
                                              int kv_len, int head_dim, ChannelRange& k) {
  __shared__ float per_warp[2][THREADS / 32];
  float q_width = 0.0f;
  if (threadIdx.x < head_dim) {
    k.read<HEAD_DIM>(s.kv + kv_head * 2 * s.kv_chunks * PARTIAL_FLOATS<HEAD_DIM>, s.kv_chunks,
                     kv_len, threadIdx.x);
    for (int i = 0; i < group; ++i) {
      ChannelRange q;
      q.widen<HEAD_DIM>(s.q + (kv_head * group + i) * s.q_chunks * PARTIAL_FLOATS<HEAD_DIM>,
                        s.q_chunks, threadIdx.x);
      q_width = max_nan(q_width, q.half_width());
    }
  }
  const float k_share = width_over_widest<HEAD_DIM>(k.half_width(), per_warp[0]);
  const float q_share = width_over_widest<HEAD_DIM>(q_width, per_warp[1]);
  return sqrtf(k_share / q_share);
}

// The root of the sum of the squares of a number per thread, none negative, in all threads; no less
// than `least`.
__device__ __forceinline__ float norm_over_block(float x, float least) {
  __shared__ float largest_of_warp[THREADS / 32], sum_of_warp[THREADS / 32];
  const float largest = max_nan(max_over_block<THREADS>(x, largest_of_warp), least);
  const float share = x / largest;  // squares of x might overflow
  float sum = share * share;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (threadIdx.x % 32 == 0) sum_of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) sum += sum_of_warp[warp];
  return max_nan(largest * sqrtf(sum), least);
}

// Channels of tokens as they are quantised: a thread takes sixteen neighbouring ones of a token, as
// many threads as that needs stand beside each other.
template <int HEAD_DIM>
struct Rotated {
  static constexpr int DIM = PADDED_DIM<HEAD_DIM>, PARTS = DIM / NVFP4_BLOCK;
  static constexpr int BLOCK = HEAD_DIM & -HEAD_DIM;  // of the rotation: largest power of two in it

  float mean[DIM];    // times RANGE; zeros from HEAD_DIM on
  float factor[DIM];  // likewise
  // No rotated value is above the norm of its token. With the rotation's own root in `factor`, codes
  // and scales hold values up to NVFP4_MAX.

  // Channel threadIdx.x, in shared memory; the caller ends it with a barrier. norm: at least that of
  // any token, after balancing.
  __device__ __forceinline__ void set_channel(float channel_mean, float balance, float norm) {
    constexpr float ROOT = BLOCK == 32    ? 5.656854249f
                           : BLOCK == 64  ? 8.0f
                           : BLOCK == 128 ? 11.313708499f
                                          : 16.0f;
    if (threadIdx.x >= DIM) return;
    mean[threadIdx.x] = channel_mean;
    factor[threadIdx.x] = balance * (NVFP4_MAX / norm) * (1.0f / ROOT);
  }

  // Block `part` of a token that starts at `token`; zeros if it does not exist. By whole warps.
  template <Dtype DTYPE>
  __device__ __forceinline__ void load(float (&x)[NVFP4_BLOCK], const char* token, bool exists,
                                       int part, int head_dim) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = part * NVFP4_BLOCK + half * 8;
      Octet<DTYPE> octet;
      octet.clear();
      const bool here = exists && channel < head_dim;
      if (here) octet.load(token + channel * ELEMENT_BYTES<DTYPE>);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float smooth = here ? fmaf(octet[i], RANGE, -mean[channel + i]) : 0.0f;
        x[half * 8 + i] = smooth * factor[channel + i];
      }
    }
#pragma unroll
    for (int bit = 1; bit < NVFP4_BLOCK; bit *= 2) {
#pragma unroll
      for (int i = 0; i < NVFP4_BLOCK; ++i) {
        if (i & bit) continue;
        const float sum = x[i] + x[i | bit];
        x[i | bit] = x[i] - x[i | bit];
        x[i] = sum;
      }
    }
#pragma unroll
    for (int distance = 1; distance < BLOCK / NVFP4_BLOCK; distance *= 2) {
      const float sign = part & distance ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < NVFP4_BLOCK; ++i) {
        x[i] = fmaf(sign, x[i], __shfl_xor_sync(0xffffffff, x[i], distance));
      }
    }
  }
};

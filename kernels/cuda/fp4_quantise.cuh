// What the kernels that quantise to NVFP4 share: smoothed values from the caller's tensors, and what
// all of K and V say about their channels.
#pragma once

#include "fp4_layout.cuh"
#include "nvfp4.cuh"
#include "token_reduction.cuh"

// Of one chunk of tokens of K or V of one (batch, key head): [3][HEAD_DIM] sums, minima, maxima,
// all times RANGE and the sums also over Nk, then the number of tokens that took part.
template <int HEAD_DIM>
constexpr int PARTIAL_FLOATS = 3 * HEAD_DIM + 4;

// The sixteen channels of block `part` of a token, less `mean` (times RANGE), times `inverse`.
// Channels from head_dim on are zero.
template <Dtype DTYPE>
__device__ __forceinline__ void load_channels(float (&x)[NVFP4_BLOCK], const char* token, int part,
                                              int head_dim, const float* mean, float inverse) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = part * NVFP4_BLOCK + half * 8;
    Octet<DTYPE> octet;
    octet.clear();
    if (channel < head_dim) octet.load(token + channel * ELEMENT_BYTES<DTYPE>);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[half * 8 + i] = fmaf(octet[i], RANGE, -mean[channel + i]) * inverse;
    }
  }
}

// Of K or V of one (batch, key head), times RANGE: the mean of each channel, and the largest
// deviation from its mean that any has.
template <int HEAD_DIM, int THREADS>
struct Smoothing {
  static constexpr int DIM = KvBlock<HEAD_DIM>::K_DIM;  // zeros from HEAD_DIM on

  float mean[DIM];
  float per_warp[THREADS / 32];

  // By all threads, `this` in shared memory, from the partial sums of the prologue. Returns the
  // largest deviation, in all threads; ends with a barrier.
  __device__ __forceinline__ float read(const float* partials, int chunks, int kv_len, int head_dim) {
    float amax = 0.0f;
    if (threadIdx.x < DIM) {
      float sum = 0.0f, low = FLOAT_MAX, high = -FLOAT_MAX, tokens = 0.0f;
      if (threadIdx.x < head_dim) {
#pragma unroll 4
        for (int chunk = 0; chunk < chunks; ++chunk) {
          const float* partial = partials + chunk * PARTIAL_FLOATS<HEAD_DIM>;
          sum += partial[threadIdx.x];
          low = min_nan(low, partial[HEAD_DIM + threadIdx.x]);
          high = max_nan(high, partial[2 * HEAD_DIM + threadIdx.x]);
          tokens += partial[3 * HEAD_DIM];
        }
      }
      const bool any = tokens > 0.0f;
      // The prologue divided by the number of all keys.
      const float found = any ? sum * (kv_len / tokens) : 0.0f;
      if (any) amax = max_nan(high - found, found - low);
      mean[threadIdx.x] = found;
    }
    return max_nan(max_over_block<THREADS>(amax, per_warp), SMALLEST_NVFP4_AMAX);
  }
};

// What the kernels that quantise to NVFP4 share: statistics of channels over chunks of tokens.
#pragma once

#include "fp4_layout.cuh"
#include "nvfp4.cuh"
#include "token_reduction.cuh"

constexpr int THREADS = 256;  // per block, of all these kernels

// Of one chunk of tokens of one head of Q, K or V: [3][HEAD_DIM] sums, minima, maxima, all times
// RANGE and the sums also over all tokens of the head, then the number of tokens that took part.
template <int HEAD_DIM>
constexpr int PARTIAL_FLOATS = 3 * HEAD_DIM + 4;

// Chunk `chunk` of the tokens of one head, into `partial`; by all threads.
template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void reduce_chunk(const Tensor& source, const LiveKeys& live, int batch,
                                             int head, int chunk, int chunk_tokens, int tokens,
                                             int head_dim, float* partial) {
  __shared__ TokenReduction<HEAD_DIM, THREADS> reduction;
  const int first = chunk * chunk_tokens;
  reduction.template reduce<DTYPE>(source, live, batch, head, first,
                                   min(first + chunk_tokens, tokens), head_dim, 1.0f / tokens);
  if (threadIdx.x >= HEAD_DIM) return;
  const auto channel = reduction.channel(threadIdx.x);
  partial[threadIdx.x] = channel.sum;
  partial[HEAD_DIM + threadIdx.x] = channel.low;
  partial[2 * HEAD_DIM + threadIdx.x] = channel.high;
  if (threadIdx.x == 0) partial[3 * HEAD_DIM] = static_cast<float>(channel.tokens);
}

// One channel of all chunks of a head, times RANGE.
struct ChannelRange {
  float mean = 0.0f;  // of the tokens that took part; zero if none did
  float low = FLOAT_MAX, high = -FLOAT_MAX;

  template <int HEAD_DIM>
  __device__ __forceinline__ void read(const float* partials, int chunks, int tokens, int channel) {
    float sum = 0.0f, counted = 0.0f;
#pragma unroll 4
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const float* partial = partials + chunk * PARTIAL_FLOATS<HEAD_DIM>;
      sum += partial[channel];
      low = min_nan(low, partial[HEAD_DIM + channel]);
      high = max_nan(high, partial[2 * HEAD_DIM + channel]);
      counted += partial[3 * HEAD_DIM];
    }
    // The sums were divided by the number of all tokens.
    if (counted > 0.0f) mean = sum * (tokens / counted);
  }

  // The largest from the mean; NaN stays.
  __device__ __forceinline__ float deviation() const {
    return low > high ? 0.0f : max_nan(high - mean, mean - low);
  }
};

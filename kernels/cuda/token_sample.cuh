// A sample of a head's tokens, held by a block of threads: for statistics that need not see them all.
#pragma once

#include "live_keys.cuh"

constexpr int SAMPLES = 128;  // tokens, or as many of them as are live

template <int HEAD_DIM, Dtype DTYPE, int THREADS>
struct TokenSample {
  static constexpr int OCTETS = HEAD_DIM / 8;
  static constexpr int ROWS = THREADS / OCTETS;  // of threads; each takes every ROWS-th token
  static constexpr int EACH = (SAMPLES + ROWS - 1) / ROWS;
  static_assert(THREADS >= SAMPLES && THREADS >= HEAD_DIM, "one token or channel per thread");

  struct Shared {
    int tokens[SAMPLES];
    float sums[ROWS][HEAD_DIM];
  };

  Octet<DTYPE> octets[EACH];
  bool taken[EACH];
  float share;  // of a token in an average

  // By all threads.
  __device__ __forceinline__ TokenSample(Shared& shared, const Tensor& source, const LiveKeys& live,
                                         int batch, int head, int tokens, int head_dim) {
    int chosen = -1;
    if (threadIdx.x < SAMPLES) {
      chosen = choose_sample<SAMPLES>(live, batch, head, tokens, threadIdx.x);
      shared.tokens[threadIdx.x] = chosen;
    }
    share = 1.0f / max(__syncthreads_count(chosen >= 0), 1);
    const int channel = octet() * 8;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int sample = row() + i * ROWS;
      const int token = row() < ROWS && sample < SAMPLES ? shared.tokens[sample] : -1;
      taken[i] = token >= 0 && channel < head_dim;
      octets[i].clear();
      if (taken[i]) {
        octets[i].load(source.token<DTYPE>(batch, head, token) + channel * ELEMENT_BYTES<DTYPE>);
      }
    }
  }

  // The average of f(value times RANGE, channel) of channel threadIdx.x, if there is such a channel.
  // By all threads; a barrier must follow before `shared` is used again.
  template <typename F>
  __device__ __forceinline__ float average(Shared& shared, F f) const {
    if (row() < ROWS) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int channel = 8 * octet() + e;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          if (taken[i]) sum += f(octets[i][e] * RANGE, channel);
        }
        shared.sums[row()][channel] = sum;
      }
    }
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < HEAD_DIM) {
#pragma unroll 4
      for (int r = 0; r < ROWS; ++r) sum += shared.sums[r][threadIdx.x];
    }
    return sum * share;
  }

 private:
  static __device__ __forceinline__ int octet() { return threadIdx.x % OCTETS; }
  static __device__ __forceinline__ int row() { return threadIdx.x / OCTETS; }
};

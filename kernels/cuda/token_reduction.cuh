// Sums, minima and maxima of each channel over a stretch of tokens, by one block of threads.
#pragma once

#include "live_keys.cuh"

// [HEAD_DIM] each, for one stretch, times RANGE; the sum also times `share`.
template <int HEAD_DIM, int THREADS>
struct TokenReduction {
  static constexpr int OCTETS = HEAD_DIM / 8;
  static constexpr int ROWS = THREADS / OCTETS;  // of threads; each takes every ROWS-th token
  static constexpr int AHEAD = 4;                // tokens whose loads are under way at a time
  static_assert(THREADS >= HEAD_DIM, "each channel is put together by one thread");

  float sum[ROWS][HEAD_DIM], low[ROWS][HEAD_DIM], high[ROWS][HEAD_DIM];
  int count[ROWS];

  // One channel of the stretch.
  struct Channel {
    float sum, low, high;
    int tokens;
  };

  // By all threads, `this` in shared memory. Takes tokens first .. end - 1 that are live; ends with
  // a barrier, after which each thread may read any channel.
  template <Dtype DTYPE>
  __device__ __forceinline__ void reduce(const Tensor& source, const LiveKeys& live, int batch,
                                         int head, int first, int end, int head_dim, float share) {
    const int octet = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
    float sums[8] = {};
    OctetRange<DTYPE> range;
    int tokens = 0;
    if (row < ROWS && 8 * octet < head_dim) {
      visit_tokens<DTYPE, ROWS, AHEAD>(
          source, live, batch, head, first, end, row, 8 * octet, [&](const Octet<DTYPE>& channels) {
            ++tokens;
            range.include(channels);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] = fmaf(channels[i], share * RANGE, sums[i]);
          });
    }
    if (row < ROWS) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[row][8 * octet + i] = sums[i];
        low[row][8 * octet + i] = range.low[i] * RANGE;
        high[row][8 * octet + i] = range.high[i] * RANGE;
      }
      if (octet == 0) count[row] = tokens;
    }
    __syncthreads();
  }

  __device__ __forceinline__ Channel channel(int index) const {
    Channel c{0.0f, FLOAT_MAX, -FLOAT_MAX, 0};
#pragma unroll 4
    for (int row = 0; row < ROWS; ++row) {
      c.sum += sum[row][index];
      c.low = min_nan(c.low, low[row][index]);
      c.high = max_nan(c.high, high[row][index]);
      c.tokens += count[row];
    }
    return c;
  }
};

// The largest of a number per thread, in all threads. `shared`: one float per warp, free to use.
template <int THREADS>
__device__ __forceinline__ float max_over_block(float x, float (&shared)[THREADS / 32]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = max_nan(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; ++warp) x = max_nan(x, shared[warp]);
  return x;
}

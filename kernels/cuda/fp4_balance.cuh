// Q and K of the query heads of one key head on their way to NVFP4: channels balanced, then rotated.
// Both leave Q K^T as it is.
//
// Balancing multiplies each channel of Q by a factor and divides it in K by the same, so that its mean
// deviation is alike in both: a channel in which K is large and Q small would cost the other fifteen
// of its block in K their precision, and itself its own in Q. Rotation (a Hadamard matrix, as in
// rows.cuh) then spreads what is large in both over all blocks. Either alone does little or harm; by
// how much, docs/fp4.md. Deviations are found in a sample of tokens, and are means: one key that
// outshines all others must not decide.
#pragma once

#include "fp4_quantise.cuh"
#include "token_sample.cuh"

// Of a channel's deviation beside the largest of its head: below, it is taken as this.
constexpr float SMALLEST_SHARE = 1.0f / 4096;
constexpr float SMALLEST_NORM = 1e-33f;  // NVFP4_MAX and a factor over it must stay finite

// The mean deviation from the mean of each channel of one head of Q or K, times RANGE; by all
// threads.
template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void find_deviations(const Tensor& source, const LiveKeys& live, int batch,
                                                int head, int tokens, int head_dim,
                                                float* deviations) {
  using Sample = TokenSample<HEAD_DIM, DTYPE, THREADS>;
  __shared__ typename Sample::Shared shared;
  __shared__ float mean[HEAD_DIM];
  const Sample sample(shared, source, live, batch, head, tokens, head_dim);
  const float average = sample.average(shared, [](float x, int) { return x; });
  if (threadIdx.x < HEAD_DIM) mean[threadIdx.x] = average;
  __syncthreads();
  const float deviation =
      sample.average(shared, [&](float x, int channel) { return fabsf(x - mean[channel]); });
  if (threadIdx.x < HEAD_DIM) deviations[threadIdx.x] = deviation;
  __syncthreads();
}

__device__ __forceinline__ float share_of_largest(float x, float (&per_warp)[THREADS / 32]) {
  const float largest = max_nan(max_over_block<THREADS>(x, per_warp), SMALLEST_NVFP4_AMAX);
  return max_nan(x / largest, SMALLEST_SHARE);
}

// Of channel threadIdx.x.
struct Deviations {
  float k = 0.0f, q = 0.0f;

  // Deviations of the key head and of the first of the `group` query heads that read it, which are
  // neighbours.
  template <int HEAD_DIM>
  __device__ __forceinline__ void read(const float* k_deviations, const float* q_deviations,
                                       int group) {
    if (threadIdx.x >= HEAD_DIM) return;
    k = k_deviations[threadIdx.x];
    for (int i = 0; i < group; ++i) q = max_nan(q, q_deviations[i * HEAD_DIM + threadIdx.x]);
  }

  // The factor of Q's channel; by all threads.
  __device__ __forceinline__ float balance() const {
    __shared__ float per_warp[2][THREADS / 32];
    return sqrtf(share_of_largest(k, per_warp[0]) / share_of_largest(q, per_warp[1]));
  }
};

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

  // Four neighbouring channels of all blocks beside each other, so that lanes meet no bank twice.
  float mean[NVFP4_BLOCK / 4][PARTS][4];    // times RANGE; zeros from head_dim on
  float factor[NVFP4_BLOCK / 4][PARTS][4];  // likewise
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
    const int part = threadIdx.x / NVFP4_BLOCK, quad = threadIdx.x % NVFP4_BLOCK / 4;
    mean[quad][part][threadIdx.x % 4] = channel_mean;
    factor[quad][part][threadIdx.x % 4] = balance * (NVFP4_MAX / norm) * (1.0f / ROOT);
  }

  // Sixteen channels, in registers.
  struct Part {
    float mean[NVFP4_BLOCK], factor[NVFP4_BLOCK];
  };

  __device__ __forceinline__ void read(Part& x, int part) const {
#pragma unroll
    for (int i = 0; i < NVFP4_BLOCK; ++i) {
      x.mean[i] = mean[i / 4][part][i % 4], x.factor[i] = factor[i / 4][part][i % 4];
    }
  }

  // Block `part` of a token that starts at `token`, as words of quantise_block; of no meaning if it
  // does not exist. By whole warps.
  template <Dtype DTYPE>
  static __device__ __forceinline__ void load(u32 (&words)[NVFP4_WORDS], const Part& channels,
                                              const char* token, bool exists, int part,
                                              int head_dim) {
    float x[NVFP4_BLOCK];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = part * NVFP4_BLOCK + half * 8;
      Octet<DTYPE> octet;
      octet.clear();
      if (exists && channel < head_dim) octet.load(token + channel * ELEMENT_BYTES<DTYPE>);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float smooth = fmaf(octet[i], RANGE, -channels.mean[half * 8 + i]);
        x[half * 8 + i] = smooth * channels.factor[half * 8 + i];
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
#pragma unroll
    for (int i = 0; i < NVFP4_WORDS; ++i) {
      words[i] = pack_f16x2(x[first_of_word(i)], x[first_of_word(i) + 4]);
    }
  }
};

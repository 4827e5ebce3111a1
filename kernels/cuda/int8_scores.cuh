// S = Q K^T of a warp's sixteen rows and a block of 64 keys, in INT8: the scores of precision
// int8_fp4, with the face of fp4_scores.cuh.
//
// The accumulators of an INT8 product lie as those of an FP4 product, and 32 channels of INT8 are as
// many bytes as 64 of FP4. So K has the same panels and its rows the same order, and P is the next
// product's operand where it stands. A query has its own scale; a key shares one with the fifteen
// others whose scores the same lane gets, so that a lane has one factor per row and block.
//
// Integers become floats for free: products start from the bits of MAGIC, so that the sums, read as
// floats, are MAGIC plus the integer.
#pragma once

#include "fp4_scores.cuh"

// MAGIC times a factor is taken off in the addend of an FFMA, which rounds it: scores are off by up
// to 1.5 of their integers, quantising moved them by hundreds. That is 1.5 factors in the exponent,
// and P must survive it. Larger factors (scores of ten thousands) are cut, for all keys of a row
// alike, which leaves the weight on the same key.
constexpr float LARGEST_INT8_FACTOR = 1.0f / 64;

template <int CHANNELS>
struct Int8Scores {
  static constexpr int HEAD_DIM = CHANNELS;
  static constexpr bool SMOOTH_Q = false;
  using Block = Int8KvBlock<HEAD_DIM>;
  static constexpr int STEPS = HEAD_DIM / 32;
  static_assert(HEAD_DIM * 127 * 127 < MAGIC_RANGE, "scores must fit beside MAGIC");

  u32 q[STEPS][4];
  float q_scale[2];  // of this lane's rows, times the softmax scale and log2(e)
  float factor[2];   // from integers to exponents of two, for this lane's keys of the block at hand

  template <typename Params>
  __device__ __forceinline__ void start(const Params& p, s64 kv_head, s64, const s64 (&rows)[2]) {
    load_queries(q, p.q_codes, rows);
    const float largest = LARGEST_INT8_FACTOR / p.kv_scales[kv_head * 2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      q_scale[r] = min_nan(reinterpret_cast<const float*>(p.q_scales)[rows[r]], largest);
    }
  }

  __device__ __forceinline__ void multiply(float (&s)[KEY_TILES][4], u32 block, u32) {
    const float k_scale = load_shared_float(block + Block::K_SCALES + threadIdx.x % 4 * 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = max_nan(q_scale[r] * k_scale, SMALLEST_FACTOR);
    const u32 codes = block + ldmatrix_offset(threadIdx.x % 32);
    u32 magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
    for (int n = 0; n < KEY_TILES; n += 2) {
      u32 d[2][4];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32 b[4];
        ldmatrix_x4(b, codes + step * PANEL + n * (8 * 32));
        mma_s8_s8(d[0], q[step], b[0], b[1], step ? d[0] : magic);
        mma_s8_s8(d[1], q[step], b[2], b[3], step ? d[1] : magic);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) s[n + i / 4][i % 4] = as_float(d[i / 4][i % 4]);
    }
  }

  __device__ __forceinline__ float exponent(float s, int r, float bias) const {
    return fmaf(s - MAGIC, factor[r], bias);
  }

  __device__ __forceinline__ float shifted(float s, int r, float shift) const {
    return fmaf(s, factor[r], shift);
  }
  __device__ __forceinline__ float shift(float x, int r) const {
    return fmaf(-MAGIC, factor[r], x);
  }

  __device__ __forceinline__ float witness(int r) const { return q_scale[r]; }
};

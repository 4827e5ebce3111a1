// S = Q K^T of a warp's sixteen rows and a block of 64 keys, in NVFP4.
//
// What attention wants of scores, whatever multiplied them: multiply() gives them in units of their
// own, as a product's accumulators hold them; exponent() and shifted() turn them into exponents of
// two. int8_scores.cuh has the other kind.
#pragma once

#include "fp4_layout.cuh"
#include "fp4_mma.cuh"

constexpr int WARP_ROWS = 16;
constexpr int KEY_TILES = BLOCK_KEYS / 8;
constexpr float SMALLEST_FACTOR = 1e-37f;  // times minus infinity it is minus infinity

// Words of two rows of Q as a product takes them: `STEPS` times 32 bytes of each row.
template <int STEPS>
__device__ __forceinline__ void load_queries(u32 (&q)[STEPS][4], const u8* codes,
                                             const s64 (&rows)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32* words = reinterpret_cast<const u32*>(codes + rows[r] * (32 * STEPS));
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      q[step][r] = words[8 * step + threadIdx.x % 4];
      q[step][r + 2] = words[8 * step + 4 + threadIdx.x % 4];
    }
  }
}

template <typename Fp4, int CHANNELS, bool SMOOTHED>
struct Fp4Scores {
  static constexpr int HEAD_DIM = CHANNELS;
  static constexpr bool SMOOTH_Q = SMOOTHED;  // blocks of Q have lost their mean
  using Block = KvBlock<HEAD_DIM>;
  static constexpr int STEPS = Block::K_DIM / 64;

  u32 q[STEPS][4], q_scales[STEPS];
  float factor;  // from scores to exponents of two

  // `rows`: of all queries, for r = 0 and 1 of this lane; kv_head, q_block: counted through all
  // batches.
  template <typename Params>
  __device__ __forceinline__ void start(const Params& p, s64 kv_head, s64 q_block,
                                        const s64 (&rows)[2]) {
    load_queries(q, p.q_codes, rows);
    const u8* row_scales = p.q_scales + (threadIdx.x % 2 ? rows[1] : rows[0]) * Block::K_SCALE_ROW;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      q_scales[step] = reinterpret_cast<const u32*>(row_scales)[step];
    }
    const float2 q_factor = p.q_factors[q_block];
    factor = max_nan(min_nan(q_factor.x * p.kv_scales[kv_head * 2], q_factor.y), SMALLEST_FACTOR);
  }

  // `block`, `delta`: shared addresses of a block of keys and of its smoothed-away scores.
  __device__ __forceinline__ void multiply(float (&s)[KEY_TILES][4], u32 block, u32 delta) {
    const int lane = threadIdx.x % 32, t = lane % 4, g = lane / 4;
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
      if constexpr (SMOOTH_Q) {
        load_shared_floats(s[n], delta + (n * 4 + t) * 16);
      } else {
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
      }
    }
    const u32 codes = block + ldmatrix_offset(lane);
    const u32 scales = block + Block::K_SCALES + (8 * t + g) * Block::K_SCALE_ROW;
#pragma unroll
    for (int group = 0; group < KEY_TILES / 4; ++group) {
      u32 k_scales[STEPS];
      const u32 at = scales + group * 32 * Block::K_SCALE_ROW;
      if constexpr (STEPS == 1) {
        k_scales[0] = load_shared_word(at);
      } else {
        load_shared_words(k_scales, at);
      }
#pragma unroll
      for (int n = 4 * group; n < 4 * group + 4; n += 2) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          u32 b[4];
          ldmatrix_x4(b, codes + step * PANEL + n * (8 * 32));
          multiply_fp4<Fp4>(n, s[n], q[step], b[0], b[1], q_scales[step], k_scales[step]);
          multiply_fp4<Fp4>(n + 1, s[n + 1], q[step], b[2], b[3], q_scales[step], k_scales[step]);
        }
      }
    }
  }

  // Of a score of row r, a bias added.
  __device__ __forceinline__ float exponent(float s, int r, float bias) const {
    return fmaf(s, factor, bias);
  }

  // The same plus `shift`, of which shift() has been told.
  __device__ __forceinline__ float shifted(float s, int r, float shift) const {
    return fmaf(s, factor, shift);
  }
  __device__ __forceinline__ float shift(float x, int r) const { return x; }

  // NaN if one in Q or K made it so: codes know none.
  __device__ __forceinline__ float witness(int r) const { return factor; }
};

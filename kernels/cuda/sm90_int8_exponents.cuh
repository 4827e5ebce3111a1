// From the integer scores of a tile to exponents of two and their exponentials, which become P.
#pragma once

#include "int8_probabilities.cuh"
#include "sm90_int8_shared.cuh"

// Of 64 rows and a tile; this thread's two rows, 8 apart, and of every eight keys two. Integers; where
// Exponents took the exact path, differences beside MAGIC_BITS.
using Scores = u32[KEYS / 2];

// Factors from scores to exponents: the product with infinity must exist.
constexpr float SMALLEST_FACTOR = 1.2e-38f;
// A score that nothing sees: beside MAGIC it is negative infinity.
constexpr u32 HIDDEN = NEGATIVE_INFINITY_BITS - MAGIC_BITS;

// A score's exponent is score * factor + shift. Scales of K differ from block to block.
struct Exponents {
  float factor[2][BLOCKS], shift[2][BLOCKS];
  float top[2];  // the largest of a row

  // k_scales: shared address of that of this thread's keys in the tile's first block.
  __device__ __forceinline__ void find(Scores& s, const float (&q_scale)[2], u32 k_scales) {
    float largest_factor = 0.0f;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float k_scale = load_shared_float(k_scales + block * (SCALES_PER_BLOCK * 4));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[r][block] = max_nan(min_nan(q_scale[r] * k_scale, LARGEST_FACTOR), SMALLEST_FACTOR);
        largest_factor = fmaxf(largest_factor, factor[r][block]);
      }
    }
    float largest[2][BLOCKS];
    find_largest(s, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = -FLOAT_MAX;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        top[r] = max_nan(top[r], __fmul_rn(largest[r][block], factor[r][block]));
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = max_nan(top[r], __shfl_xor_sync(0xffffffff, top[r], distance));
      }
    }
    if (__any_sync(0xffffffff, largest_factor > LARGEST_FAST_FACTOR)) {
      take_largest(s, largest);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * BLOCKS; ++i) {
        const int r = i % 2, block = i / 2;
        shift[r][block] = fmaf(-MAGIC_WITH_MARGIN, factor[r][block], LOG2_255 - top[r]);
      }
    }
  }

  // x: 255 times the exponentials of 16 keys' scores less the row's top, in the order of scores.
  // packed: a number that exists when the keys 32 and more before are bytes; as a float, finite.
  __device__ __forceinline__ void raise(const Scores& s, int sixteen, const u32 (&packed)[2],
                                        float (&x)[8]) const {
    const int block = sixteen / 4;
    float start[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      start[r] = shift[r][block];
      // Adds nothing, but makes the compiler wait: left alone it puts all of a tile's FFMA before
      // all of its exponentials, and of two units one idles at a time.
      if (sixteen > 1) start[r] = fmaf(as_float(packed[1 - r]), 0.0f, start[r]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 2 % 2;
      const float score = as_float(s[sixteen * 8 + i] + MAGIC_BITS);
      x[i] = exp2_approx(fmaf(score, factor[r][block], start[r]));
    }
  }

 private:
  static __device__ __forceinline__ float as_number(u32 score) {
    return as_float(score + MAGIC_BITS) - MAGIC;
  }

  // Of a row and block; negative infinity where all of it is hidden.
  static __device__ __forceinline__ void find_largest(const Scores& s,
                                                      float (&largest)[2][BLOCKS]) {
    // Chains of maxima side by side, as each waits for itself; one instruction takes three numbers.
    s32 chains[2 * BLOCKS];
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
#pragma unroll
      for (int chain = 0; chain < 2 * BLOCKS; ++chain) {
        const int at = chain / 2 * 32 + i / 2 * 4 + chain % 2 * 2;
        const s32 larger = max(static_cast<s32>(s[at]), static_cast<s32>(s[at + 1]));
        chains[chain] = i > 0 ? max(chains[chain], larger) : larger;
      }
    }
#pragma unroll
    for (int chain = 0; chain < 2 * BLOCKS; ++chain) {
      largest[chain % 2][chain / 2] = as_number(chains[chain]);
    }
  }

  // The exact path: differences from the largest score of the block, which are exact, so that no
  // exponent exceeds the row's.
  __device__ __forceinline__ void take_largest(Scores& s, const float (&largest)[2][BLOCKS]) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      const float least = fmaxf(largest[i / 2 % 2][i / 32], -FLOAT_MAX);
      s[i] = as_bits(as_number(s[i]) - least) - MAGIC_BITS;
    }
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
      const int r = i % 2, block = i / 2;
      shift[r][block] = __fmul_rn(largest[r][block], factor[r][block]) - top[r] + LOG2_255;
    }
  }
};

// P of INT8 attention: 2^exponent in 0..255, by each tile's own maximum.
//
// A row's largest score elsewhere thus never costs a tile its resolution (the error of P at 16k
// normal tokens is 2.3% with the running maximum, 0.6% with this one), and nothing is rescaled as
// maxima grow: P V, exact in integers, joins an FP32 accumulator weighted by the tile's maximum.
//
// Integers become floats for free. Scores stand beside MAGIC: the sum of the bits, read as a float,
// is that number plus the integer. P V is never negative, as codes of V are not, and stays below
// DENORMAL_RANGE: its bits, read as a float, are the integer times 2^-149, which FFMA takes as it
// takes any other number.
#pragma once

#include "int8_layout.cuh"
#include "ptx.cuh"

constexpr float LOG2_255 = 7.99435343685886f;

// MAGIC times a factor is taken off in the addend of an FFMA, which rounds it: exponents are off by
// less than 4 score factors, downwards, so that P stays below 255.5. From this factor on (scores in
// the ten thousands) it would be felt, and the exact path is taken.
constexpr float LARGEST_FAST_FACTOR = 1.0f / 128;
constexpr float MAGIC_WITH_MARGIN = MAGIC + 4.0f;

constexpr int DENORMAL_RANGE = 1 << 23;

// A row's accumulator and its sum of P are kept in units of 2^(reference - LOG2_WEIGHT + 149), so
// that a tile's weight is a normal number however far its maximum is below the reference. This one
// moves only when a tile's maximum leaves it REFERENCE_SLACK below, which few rows see twice; the
// weight is then at most 2^(LOG2_WEIGHT + REFERENCE_SLACK).
constexpr float LOG2_WEIGHT = 100.0f, REFERENCE_SLACK = 24.0f;
constexpr float LOG2_UNIT = LOG2_255 + LOG2_WEIGHT - 149.0f;  // of a sum of P, see log_of_sum()

// A tile's weight, by its maximum.
__device__ __forceinline__ float weight_of(float top, float reference) {
  return exp2_approx(top - reference + LOG2_WEIGHT);
}

// Moves the references of a lane's two rows if tops of the warp left theirs behind, and says so.
// shrink: what that does to whatever is kept in units of the reference, as `sum` is.
__device__ __forceinline__ bool follow_tops(const float (&top)[2], float (&reference)[2],
                                            float (&sum)[2], float (&shrink)[2]) {
  // Differences, which are exact where they are small: a sum of 10^8 and the slack would be rounded.
  const bool behind =
      top[0] - reference[0] > REFERENCE_SLACK || top[1] - reference[1] > REFERENCE_SLACK;
  if (!__any_sync(0xffffffff, behind)) return false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float moved = max_nan(reference[r], top[r]);
    shrink[r] = exp2_approx(reference[r] - moved);
    reference[r] = moved;
    sum[r] *= shrink[r];
  }
  return true;
}

// Four numbers from 0 to 255, rounded and packed.
__device__ __forceinline__ u32 round_to_bytes(float x0, float x1, float x2, float x3) {
  u32 bytes;
#if __CUDA_ARCH__ >= 860
  // Becomes two instructions (F2IP); earlier chips lack it and would need six.
  asm("{.reg .s32 i0, i1, i2, i3; .reg .b32 high;\n"
      "cvt.rni.s32.f32 i0, %1; cvt.rni.s32.f32 i1, %2;\n"
      "cvt.rni.s32.f32 i2, %3; cvt.rni.s32.f32 i3, %4;\n"
      "cvt.pack.sat.u8.s32.b32 high, i3, i2, 0; cvt.pack.sat.u8.s32.b32 %0, i1, i0, high;}"
      : "=r"(bytes)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
#else
  // Rounding is an addition of 1024 in FP16, whose last place is then 1.
  u32 low = pack_f16x2(x0, x1), high = pack_f16x2(x2, x3);
  bytes = permute_bytes(add_f16x2(low, 0x64006400u), add_f16x2(high, 0x64006400u), 0x6420);
#endif
  return bytes;
}

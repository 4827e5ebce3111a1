// NVFP4: sixteen E2M1 values and their E4M3 scale. Conversions in instructions where the chip has
// them, else in arithmetic that gives the same bits.
#pragma once

#include "ptx.cuh"

constexpr int NVFP4_BLOCK = 16;
constexpr float E2M1_MAX = 6.0f;
constexpr float E4M3_MAX = 448.0f;
constexpr float SMALLEST_E4M3 = 0.001953125f;  // 2^-9
// A tensor's largest value is scaled to this, so that block scales use all of E4M3.
constexpr float NVFP4_MAX = E4M3_MAX * E2M1_MAX;
constexpr float SMALLEST_NVFP4_AMAX = 1e-35f;  // NVFP4_MAX / amax must stay finite

// ------------------------------------------------------------------------------------------- E4M3
// Four positive numbers, rounded to nearest even, saturating at 448; the first in the low byte.
__device__ __forceinline__ u32 pack_e4m3(float x0, float x1, float x2, float x3) {
  u32 codes;
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
      : "=r"(codes)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
#else
  const float x[4] = {x0, x1, x2, x3};
  codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float clipped = fminf(x[i], E4M3_MAX);
    // Below 2^-6 codes count steps of 2^-9; above, a code is exponent and three bits of mantissa.
    const u32 steps = as_bits(fmaf(clipped, 1.0f / SMALLEST_E4M3, MAGIC)) - MAGIC_BITS;
    const u32 bits = as_bits(clipped);
    const u32 rounded = (bits + 0x7ffffu + (bits >> 20 & 1)) >> 20;
    codes |= (clipped < 0.015625f ? steps : rounded - (120 << 3)) << (8 * i);
  }
#endif
  return codes;
}

__device__ __forceinline__ float decode_e4m3(u32 code) {
  return as_float(code << 20) * 1.329227996e36f;  // 2^120 moves the exponent's bias from 127 to 7
}

__device__ __forceinline__ void unpack_e4m3(float (&x)[4], u32 codes) {
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high, a, b, c, d; .reg .b32 ab, cd; mov.b32 {low, high}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 ab, low; cvt.rn.f16x2.e4m3x2 cd, high;\n"
      "mov.b32 {a, b}, ab; mov.b32 {c, d}, cd;\n"
      "cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; cvt.f32.f16 %2, c; cvt.f32.f16 %3, d;}"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(codes));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = decode_e4m3(codes >> (8 * i) & 0xff);
#endif
}

// ------------------------------------------------------------------------------------------- E2M1
// Eight numbers to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even
// code, saturating; the first in the low nibble.
__device__ __forceinline__ u32 pack_e2m1_by_arithmetic(const float (&x)[8]) {
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float size = fabsf(x[i]);
    const u32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                     (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
    codes |= (code | as_bits(x[i]) >> 28 & 8) << (4 * i);
  }
  return codes;
}

#if __CUDA_ARCH__ >= 1200
__device__ __forceinline__ u32 pack_e2m1_by_instruction(const float (&x)[8]) {
  u32 codes;
  asm("{.reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d};}"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return codes;
}
#endif
__device__ __forceinline__ u32 pack_e2m1(const float (&x)[8]) {
#if __CUDA_ARCH__ >= 1200
  return pack_e2m1_by_instruction(x);
#else
  return pack_e2m1_by_arithmetic(x);
#endif
}

// ----------------------------------------------------------------------------------------- blocks
// Block maxima that a scale may map to E2M1's maximum, best first where their errors tie: a target
// under 6 saturates the largest values or moves them to a finer part of the grid. Tried in turn, and
// the one with the least squared error kept.
constexpr int TARGETS = 4;
constexpr float INVERSE_TARGETS[TARGETS] = {1 / 6.0f, 1 / 5.0f, 1 / 4.5f, 1 / 4.0f};

struct Nvfp4Block {
  uint2 codes;
  u32 scale;
};

__device__ __forceinline__ float round_e2m1(float x) {
  x = fmaxf(fminf(x, E2M1_MAX), -E2M1_MAX);
  // The grid's step is half the power of two below x, but no less than below 1. Beside 1.5 * 2^22
  // times that power, the adder itself rounds to the step, ties to even.
  const float power = as_float(as_bits(x) & 0x7f800000u);
  const float anchor = fminf(fmaxf(power, 1.0f), 4.0f) * 6291456.0f;
  return x + anchor - anchor;
}

// Sixteen values of a tensor whose largest was scaled to NVFP4_MAX.
__device__ __forceinline__ Nvfp4Block quantise_block(const float (&x)[NVFP4_BLOCK]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < NVFP4_BLOCK; ++i) amax = fmaxf(amax, fabsf(x[i]));
  float lowest = FLOAT_MAX, inverse = 1.0f;
  u32 scale = 0;
#pragma unroll
  for (int target = 0; target < TARGETS; ++target) {
    const u32 code = pack_e4m3(amax * INVERSE_TARGETS[target], 0.0f, 0.0f, 0.0f);
    const float factor = decode_e4m3(code);
    const float divisor = code == 0 ? 1.0f : 1.0f / factor;
    float error = 0.0f;
#pragma unroll
    for (int i = 0; i < NVFP4_BLOCK; ++i) {
      const float off = fmaf(round_e2m1(x[i] * divisor), factor, -x[i]);
      error = fmaf(off, off, error);
    }
    if (error < lowest) lowest = error, inverse = divisor, scale = code;
  }
  float low[8], high[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) low[i] = x[i] * inverse, high[i] = x[i + 8] * inverse;
  return {make_uint2(pack_e2m1(low), pack_e2m1(high)), scale};
}

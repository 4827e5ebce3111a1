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

// ----------------------------------------------------------------------------------------- blocks
// Block maxima that a scale may map to E2M1's maximum, best first where their errors tie: a target
// under 6 saturates the largest values or moves them to a finer part of the grid. Tried in turn, and
// the one with the least squared error kept.
constexpr int TARGETS = 4;
constexpr float INVERSE_TARGETS[TARGETS] = {1 / 6.0f, 1 / 5.0f, 1 / 4.5f, 1 / 4.0f};

// Sixteen values as eight words of two FP16: value `first` of a word in its low half, the one four
// after it in its high half. So four words are the codes of eight values, nibble by nibble.
constexpr int NVFP4_WORDS = NVFP4_BLOCK / 2;
__device__ constexpr int first_of_word(int word) { return word + (word & 4); }

struct Nvfp4Block {
  uint2 codes;
  u32 scale;
};

// Where 1 is FP16's smallest normal number, E2M1's numbers are the codes themselves, 9 bits up, its
// subnormal included: rounding is an addition of integers.
constexpr u32 TO_SMALLEST_NORMAL = 0x04000400, FROM_SMALLEST_NORMAL = 0x74007400;  // 2^-14, 2^14

// The squares of how far each of the values, not negative, is from E2M1 times `unit`. Beyond 6 the
// grid goes on with 8, which matters to subnormal scales only.
__device__ __forceinline__ float squared_error(const u32 (&sizes)[NVFP4_WORDS], u32 inverse,
                                               float unit) {
  u32 squares = 0;
#pragma unroll
  for (int i = 0; i < NVFP4_WORDS; ++i) {
    const u32 x = multiply_f16x2(sizes[i], inverse);
    const u32 rounded = (multiply_f16x2(x, TO_SMALLEST_NORMAL) + 0x01000100) & 0xfe00fe00;
    const u32 off = multiply_add_f16x2(rounded, FROM_SMALLEST_NORMAL ^ 0x80008000, x);
    squares = multiply_add_f16x2(off, off, squares);
  }
  return (f16_to_float(squares) + f16_to_float(squares >> 16)) * unit * unit;
}

// Codes of eight values, given as four words and as their sizes: to the nearest, ties to the even
// code, saturating.
__device__ __forceinline__ u32 encode_e2m1(const u32* x, const u32* sizes, u32 inverse) {
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 bits = multiply_f16x2(multiply_f16x2(sizes[i], inverse), TO_SMALLEST_NORMAL);
    bits = min_nan_of<F16>(bits, 0x0e000e00);  // 6
    bits += 0x00ff00ff + (bits >> 9 & 0x00010001);
    const u32 signed_codes = (bits << 3 & 0x70007000) | (x[i] & 0x80008000);
    codes |= signed_codes >> (12 - 4 * i) & 0x000f000fu << (4 * i);
  }
  return codes;
}

// Sixteen values of a tensor whose largest was scaled to NVFP4_MAX. Two at a time in FP16, whose
// rounding is 2^-11 of a value where that of E2M1 is 2^-2: a fourth of the instructions of FP32.
__device__ __forceinline__ Nvfp4Block quantise_block(const u32 (&x)[NVFP4_WORDS]) {
  u32 sizes[NVFP4_WORDS], largest = 0;
#pragma unroll
  for (int i = 0; i < NVFP4_WORDS; ++i) {
    sizes[i] = x[i] & 0x7fff7fff;
    largest = max_nan_of<F16>(largest, sizes[i]);
  }
  const float amax = fmaxf(f16_to_float(largest), f16_to_float(largest >> 16));
  const u32 candidates = pack_e4m3(amax * INVERSE_TARGETS[0], amax * INVERSE_TARGETS[1],
                                   amax * INVERSE_TARGETS[2], amax * INVERSE_TARGETS[3]);
  float units[TARGETS];
  unpack_e4m3(units, candidates);
  float lowest = FLOAT_MAX;
  u32 scale = 0, inverse = 0x3c003c00;  // 1
#pragma unroll
  for (int target = 0; target < TARGETS; ++target) {
    const float unit = units[target] == 0.0f ? 1.0f : units[target];
    const float reciprocal = reciprocal_approx(unit);
    const u32 candidate = pack_f16x2(reciprocal, reciprocal);
    const float error = squared_error(sizes, candidate, unit);
    if (error < lowest) {
      lowest = error, inverse = candidate, scale = candidates >> (8 * target) & 0xff;
    }
  }
  return {make_uint2(encode_e2m1(x, sizes, inverse), encode_e2m1(x + 4, sizes + 4, inverse)), scale};
}

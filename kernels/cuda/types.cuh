// Fixed-width integers, element types of the callers' tensors, and bit casts: NVRTC has no headers.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using s32 = int;
using s64 = long long;

constexpr float FLOAT_MAX = 3.402823466e38f;
constexpr u32 NEGATIVE_INFINITY_BITS = 0xff800000u;

// A float this large ends in the units: beside it, an integer is read off the low bits.
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
constexpr u32 MAGIC_BITS = 0x4b400000u;
constexpr int MAGIC_RANGE = 1 << 22;  // integers up to it, either way, can stand beside MAGIC

// Element types of Q, K, V, O and masks; the launchers pass the same numbers.
enum Dtype : int { F16 = 0, BF16 = 1, F32 = 2, BOOL = 3 };

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 as_bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float f16_to_float(u32 low_half) {
  float x;
  asm("{.reg .b16 h, unused; mov.b32 {h, unused}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(low_half));
  return x;
}

// Element `high` (0 or 1) of two 16-bit elements packed in a word.
template <Dtype DTYPE>
__device__ __forceinline__ float unpack_16bit(u32 pair, int high) {
  if constexpr (DTYPE == BF16) {
    return as_float(high ? pair & 0xffff0000u : pair << 16);
  } else {
    return f16_to_float(high ? pair >> 16 : pair);
  }
}

__device__ __forceinline__ u32 pack_f16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Maxima and minima that keep NaN, so that a NaN input reaches the output instead of vanishing.
__device__ __forceinline__ float max_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

__device__ __forceinline__ float min_nan(float a, float b) {
  float m;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

// The same on a word of one FP32 or two 16-bit elements.
template <Dtype DTYPE>
__device__ __forceinline__ u32 max_nan_of(u32 a, u32 b) {
  u32 m;
  if constexpr (DTYPE == F32) {
    m = as_bits(max_nan(as_float(a), as_float(b)));
  } else if constexpr (DTYPE == BF16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  }
  return m;
}

template <Dtype DTYPE>
__device__ __forceinline__ u32 min_nan_of(u32 a, u32 b) {
  u32 m;
  if constexpr (DTYPE == F32) {
    m = as_bits(min_nan(as_float(a), as_float(b)));
  } else if constexpr (DTYPE == BF16) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  }
  return m;
}

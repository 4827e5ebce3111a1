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

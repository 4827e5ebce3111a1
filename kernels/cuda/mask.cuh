// The caller's mask, read by strides where it lies: broadcast dimensions have stride 0.
#pragma once

#include "ptx.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

struct Mask {
  const void* data;
  s64 batch_stride, head_stride, query_stride, key_stride;  // in elements
  int dtype;
  int in_fours;  // four neighbouring keys may be read at once: contiguous, aligned

  __device__ __forceinline__ s64 row(int batch, int head, int query) const {
    return batch * batch_stride + head * head_stride + query * query_stride;
  }

  // Four bytes, nonzero where keys key .. key + 3 of a boolean mask are visible.
  __device__ __forceinline__ u32 visible(s64 row, int key, int kv_len) const {
    const u8* flags = static_cast<const u8*>(data) + row + key * key_stride;
    if (in_fours && key + 4 <= kv_len) return *reinterpret_cast<const u32*>(flags);
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key + i < kv_len && flags[i * key_stride]) word |= 1u << (8 * i);
    }
    return word;
  }

  // Biases of keys key .. key + 3, times log2(e): scores are kept as exponents of two.
  __device__ __forceinline__ void biases(float (&bias)[4], s64 row, int key, int kv_len) const {
    const s64 offset = row + key * key_stride;
    if (in_fours && key + 4 <= kv_len) {
      if (dtype == F32) {
        const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(data) + offset);
        bias[0] = x.x, bias[1] = x.y, bias[2] = x.z, bias[3] = x.w;
      } else {
        const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const u16*>(data) + offset);
        bias[0] = from_16bit(x.x), bias[1] = from_16bit(x.x >> 16);
        bias[2] = from_16bit(x.y), bias[3] = from_16bit(x.y >> 16);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const s64 element = offset + i * key_stride;
        bias[i] = key + i >= kv_len ? 0.0f
                  : dtype == F32    ? static_cast<const float*>(data)[element]
                                    : from_16bit(static_cast<const u16*>(data)[element]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = to_exponent(bias[i]);
  }

 private:
  __device__ __forceinline__ float from_16bit(u32 low_half) const {
    return dtype == BF16 ? as_float(low_half << 16) : f16_to_float(low_half);
  }

  // A finite bias stays finite: the lowest finite one hides beside others, but a row that has
  // nothing else attends evenly, as in plain attention.
  static __device__ __forceinline__ float to_exponent(float bias) {
    const float exponent = bias * LOG2_E;
    return bias < -FLOAT_MAX ? bias : max_nan(exponent, -0.99f * FLOAT_MAX);
  }
};

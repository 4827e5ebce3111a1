// Channels of a token as a quad of lanes holds them while it quantises Q or K.
#pragma once

#include "ptx.cuh"

// Inputs are multiplied by this as they are read, so that no sum over channels or tokens of finite
// BF16 or FP32 values overflows; scales and means take it back.
constexpr float RANGE = 1.0f / 256;

constexpr float INT8_MAX = 127.0f;
constexpr float SMALLEST_AMAX = 1e-36f;  // 127 / amax must stay finite

// Element `high` (0 or 1) of two 16-bit elements packed in a word.
template <Dtype DTYPE>
__device__ __forceinline__ float unpack_16bit(u32 pair, int high) {
  if constexpr (DTYPE == BF16) {
    return as_float(high ? pair & 0xffff0000u : pair << 16);
  } else {
    return f16_to_float(high ? pair >> 16 : pair);
  }
}

// Eight neighbouring channels as they lie in memory.
template <Dtype DTYPE>
struct Octet {
  static constexpr int WORDS = DTYPE == F32 ? 8 : 4;
  u32 words[WORDS];

  // `source` is 16-byte aligned.
  __device__ __forceinline__ void load(const void* source) {
    const uint4* vectors = static_cast<const uint4*>(source);
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i) {
      uint4 v = vectors[i];
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = 0;
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (DTYPE == F32) {
      return as_float(words[i]);
    } else {
      return unpack_16bit<DTYPE>(words[i / 2], i % 2);
    }
  }
};

template <Dtype DTYPE>
constexpr int ELEMENT_BYTES = DTYPE == F32 ? 4 : 2;

// [B, H, N, D] of the caller: strides in elements, channels contiguous.
struct Tensor {
  const void* data;
  s64 batch_stride, head_stride, token_stride;

  template <Dtype DTYPE>
  __device__ __forceinline__ const char* token(int batch, int head, int n) const {
    return static_cast<const char*>(data) +
           (batch * batch_stride + head * head_stride + n * token_stride) * ELEMENT_BYTES<DTYPE>;
  }
};

// One token's channels over a quad: lane `t` of it holds channels 32c + 8t .. 32c + 8t + 7.
template <int HEAD_DIM>
struct QuadRow {
  static constexpr int CHUNKS = HEAD_DIM / 32;
  static constexpr int BLOCK = HEAD_DIM & -HEAD_DIM;  // of the rotation: largest power of two in it
  float x[CHUNKS][8];

  // Multiply by the Walsh-Hadamard matrix, block-diagonal with blocks of BLOCK, without its
  // factor BLOCK ** -0.5. The same orthogonal rotation of Q and K leaves Q K^T as it is and spreads
  // outlier channels over all, which the even grid of INT8 needs.
  __device__ __forceinline__ void rotate(int t) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int bit = 1; bit < 8; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (!(i & bit)) butterfly(x[c][i], x[c][i | bit]);
        }
      }
    }
#pragma unroll
    for (int bit = 1; bit < BLOCK / 32; bit *= 2) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (!(c & bit)) butterfly(x[c][i], x[c | bit][i]);
        }
      }
    }
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      float sign = t & bit ? -1.0f : 1.0f;
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[c][i] = fmaf(x[c][i], sign, __shfl_xor_sync(0xffffffff, x[c][i], bit));
        }
      }
    }
  }

  // Largest |x| of this lane's channels.
  __device__ __forceinline__ float amax() const {
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = max_nan(largest, fabsf(x[c][i]));
    }
    return largest;
  }

  // Codes of chunk c: round(x * inverse) of eight channels.
  __device__ __forceinline__ uint2 codes(int c, float inverse) const;

 private:
  static __device__ __forceinline__ void butterfly(float& a, float& b) {
    float sum = a + b;
    b = a - b;
    a = sum;
  }
};

// Round to the nearest integer, left in the low byte (two's complement): adding MAGIC puts it
// there in one instruction of the FP32 pipe, where a conversion would take the slow one.
__device__ __forceinline__ u32 round_to_byte(float x, float scale) {
  return as_bits(fmaf(x, scale, MAGIC));
}

__device__ __forceinline__ u32 pack_bytes(u32 b0, u32 b1, u32 b2, u32 b3) {
  return permute_bytes(permute_bytes(b0, b1, 0x0040), permute_bytes(b2, b3, 0x0040), 0x5410);
}

template <int HEAD_DIM>
__device__ __forceinline__ uint2 QuadRow<HEAD_DIM>::codes(int c, float inverse) const {
  u32 b[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) b[i] = round_to_byte(x[c][i], inverse);
  return make_uint2(pack_bytes(b[0], b[1], b[2], b[3]), pack_bytes(b[4], b[5], b[6], b[7]));
}

// Factor from codes back to the rotated values: amax / 127, less what rotation and RANGE left out.
template <int HEAD_DIM>
__device__ __forceinline__ float rotated_scale(float amax) {
  constexpr int BLOCK = QuadRow<HEAD_DIM>::BLOCK;
  constexpr float ROOT = BLOCK == 32    ? 5.656854249f
                         : BLOCK == 64  ? 8.0f
                         : BLOCK == 128 ? 11.313708499f
                                        : 16.0f;
  return amax * (1.0f / (INT8_MAX * RANGE * ROOT));
}

__device__ __forceinline__ float max_over_quad(float x) {
  x = max_nan(x, __shfl_xor_sync(0xffffffff, x, 1));
  return max_nan(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// Tokens of Q, K or V as lanes hold them while they are quantised.
#pragma once

#include "ptx.cuh"

// Inputs are multiplied by this as they are read, so that no sum over channels or tokens of finite
// BF16 or FP32 values overflows; scales and means take it back.
constexpr float RANGE = 1.0f / 256;

constexpr float INT8_MAX = 127.0f;
constexpr float SMALLEST_AMAX = 1e-36f;   // 127 / amax must stay finite
constexpr float SMALLEST_RANGE = 1e-34f;  // likewise, of values that RANGE has not touched

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

  // Channels 2i and 2i + 1 as mma_16bit takes them: FP32 as the sum of two BF16, which keep 16 bits
  // of its 24.
  static constexpr int PARTS = DTYPE == F32 ? 2 : 1;
  __device__ __forceinline__ u32 pair(int i, int part) const {
    if constexpr (DTYPE == F32) {
      const u32 x = words[2 * i], y = words[2 * i + 1];
      if (part == 0) return permute_bytes(x, y, 0x7632);
      return pack_bf16x2(as_float(x) - as_float(x & 0xffff0000u),
                         as_float(y) - as_float(y & 0xffff0000u));
    } else {
      return words[i];
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (DTYPE == F32) {
      return as_float(words[i]);
    } else {
      return unpack_16bit<DTYPE>(words[i / 2], i % 2);
    }
  }
};

// Lowest and highest of each of eight channels. In 16 bits two channels take one instruction.
template <Dtype DTYPE>
struct OctetRange {
  Octet<DTYPE> low, high;

  __device__ __forceinline__ OctetRange() {
    constexpr u32 INFINITY_BITS =
        DTYPE == F32 ? 0x7f800000 : DTYPE == BF16 ? 0x7f807f80 : 0x7c007c00;
    constexpr u32 SIGNS = DTYPE == F32 ? 0x80000000 : 0x80008000;
#pragma unroll
    for (int i = 0; i < Octet<DTYPE>::WORDS; ++i) {
      low.words[i] = INFINITY_BITS, high.words[i] = INFINITY_BITS | SIGNS;
    }
  }

  __device__ __forceinline__ void include(const Octet<DTYPE>& octet) {
#pragma unroll
    for (int i = 0; i < Octet<DTYPE>::WORDS; ++i) {
      low.words[i] = min_nan_of<DTYPE>(low.words[i], octet.words[i]);
      high.words[i] = max_nan_of<DTYPE>(high.words[i], octet.words[i]);
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

// Entries of the rotation for mma_16bit: B[k][n] = RANGE times the sign of the Walsh-Hadamard matrix
// of order 16, for n-tiles 0 and 1.
template <Dtype DTYPE>
struct HadamardTiles {
  u32 b[2][2];

  __device__ __forceinline__ HadamardTiles() {
    constexpr u32 ENTRY = DTYPE == F16 ? 0x1c001c00 : 0x3b803b80;  // RANGE, twice
    const int n = threadIdx.x % 32 / 4, k = threadIdx.x % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 low = __popc((n + 8 * tile) & (k + 8 * half)) & 1;
        const u32 high = __popc((n + 8 * tile) & (k + 8 * half + 1)) & 1;
        b[tile][half] = ENTRY ^ (low << 15) ^ (high << 31);
        // Some are equal; known to be so they would be copied for every product.
        asm("" : "+r"(b[tile][half]));
      }
    }
  }
};

// Two tokens' channels, rotated: lane `t` of a quad holds channels 32c + 8t .. 32c + 8t + 7 of each.
// A warp thus holds 16 tokens, one more for every quad and eight after that.
template <int HEAD_DIM>
struct QuadRows {
  static constexpr int CHUNKS = HEAD_DIM / 32;
  static constexpr int BLOCK = HEAD_DIM & -HEAD_DIM;  // of the rotation: largest power of two in it
  float x[2][CHUNKS][8];

  // Multiply `octets` by RANGE and by the Walsh-Hadamard matrix, block-diagonal with blocks of
  // BLOCK, without its factor BLOCK ** -0.5. The same orthogonal rotation of Q and K leaves Q K^T as
  // it is and spreads outlier channels over all, which the even grid of INT8 needs.
  //
  // The matrix is a product over the bits of the channel's number. Four of them (0, 2, 3 and 4,
  // which within and across lanes) are one matrix product for each 32 channels of a token, exact but
  // for the rounding of FP32; bit 1 and those from 5 on are sums within the lane. A's registers are
  // then an octet as it was loaded, and D's hold its channels in order.
  //
  // start(channel): what these products start from for four channels.
  template <Dtype DTYPE, typename Start>
  __device__ __forceinline__ void rotate(const Octet<DTYPE> (&octets)[2][CHUNKS],
                                         const HadamardTiles<DTYPE>& hadamard, Start start) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const float4 first = start(32 * c + threadIdx.x % 4 * 8 + 4 * tile);
          float sums[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
          for (int part = 0; part < Octet<DTYPE>::PARTS; ++part) {
            const u32 a[4] = {octets[r][c].pair(0, part), octets[r][c].pair(1, part),
                              octets[r][c].pair(2, part), octets[r][c].pair(3, part)};
            mma_16bit<DTYPE>(sums, a, hadamard.b[tile]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) x[r][c][4 * tile + i] = sums[i];
        }
      }
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (!(i & 2)) butterfly(x[r][c][i], x[r][c][i + 2]);
        }
      }
#pragma unroll
      for (int bit = 1; bit < BLOCK / 32; bit *= 2) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (!(c & bit)) butterfly(x[r][c][i], x[r][c | bit][i]);
          }
        }
      }
    }
  }

  // Largest |x| of this lane's channels of token `r`.
  __device__ __forceinline__ float amax(int r) const {
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = max_nan(largest, fabsf(x[r][c][i]));
    }
    return largest;
  }

  // round(x * inverse) of token `r`'s eight channels in chunk `c`.
  __device__ __forceinline__ uint2 codes(int r, int c, float inverse) const;

 private:
  static __device__ __forceinline__ void butterfly(float& a, float& b) {
    float sum = a + b;
    b = a - b;
    a = sum;
  }
};

// round(x * scale) + origin - MAGIC, left in the low byte (two's complement), for an integer
// `origin` near MAGIC: one instruction of the FP32 pipe, where a conversion would take the slow one.
__device__ __forceinline__ u32 round_to_byte(float x, float scale, float origin) {
  return as_bits(fmaf(x, scale, origin));
}

__device__ __forceinline__ u32 pack_bytes(u32 b0, u32 b1, u32 b2, u32 b3) {
  return permute_bytes(permute_bytes(b0, b1, 0x0040), permute_bytes(b2, b3, 0x0040), 0x5410);
}

template <int HEAD_DIM>
__device__ __forceinline__ uint2 QuadRows<HEAD_DIM>::codes(int r, int c, float inverse) const {
  u32 b[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) b[i] = round_to_byte(x[r][c][i], inverse, MAGIC);
  return make_uint2(pack_bytes(b[0], b[1], b[2], b[3]), pack_bytes(b[4], b[5], b[6], b[7]));
}

// The rotation's sums over a block of channels, divided by this, are orthonormal.
template <int HEAD_DIM>
constexpr float ROTATION_ROOT = QuadRows<HEAD_DIM>::BLOCK == 32    ? 5.656854249f
                                : QuadRows<HEAD_DIM>::BLOCK == 64  ? 8.0f
                                : QuadRows<HEAD_DIM>::BLOCK == 128 ? 11.313708499f
                                                                   : 16.0f;

// Factor from codes back to the rotated values: amax / 127, less what rotation and RANGE left out.
template <int HEAD_DIM>
__device__ __forceinline__ float rotated_scale(float amax) {
  return amax * (1.0f / (INT8_MAX * RANGE * ROTATION_ROOT<HEAD_DIM>));
}

__device__ __forceinline__ float max_over_quad(float x) {
  x = max_nan(x, __shfl_xor_sync(0xffffffff, x, 1));
  return max_nan(x, __shfl_xor_sync(0xffffffff, x, 2));
}

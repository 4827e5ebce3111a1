// Results as the caller wants them: in its dtype, by its strides.
#pragma once

#include "ptx.cuh"

constexpr float LN_2 = 0.6931471805599453f;

// Natural logarithm of a row's sum of exponentials, which was kept as `sum` units of
// 2^(reference - log2_unit).
__device__ __forceinline__ float log_of_sum(float reference, float sum, float log2_unit) {
  // A bias near -FLOAT_MAX was cut there, as an exponent of two: LN_2 times that is too much.
  if (reference < 0.98f * -FLOAT_MAX && sum > 0.0f) return -FLOAT_MAX;
  return (reference + (log2_approx(sum) - log2_unit)) * LN_2;
}

// One token of one head, its channels contiguous.
template <Dtype DTYPE>
struct OutputRow {
  u8* data;

  // Channels `channel` and `channel` + 1.
  __device__ __forceinline__ void store(int channel, float x, float y) const {
    if constexpr (DTYPE == F16) {  // quantisation may carry a value past the largest input
      x = max_nan(min_nan(x, 65504.0f), -65504.0f);
      y = max_nan(min_nan(y, 65504.0f), -65504.0f);
    }
    store_unlimited(channel, x, y);
  }

  // The same for gradients, whose overflow must show: a loss scaler looks for infinities.
  __device__ __forceinline__ void store_unlimited(int channel, float x, float y) const {
    if constexpr (DTYPE == F32) {
      *reinterpret_cast<float2*>(data + channel * 4) = make_float2(x, y);
    } else {
      *reinterpret_cast<u32*>(data + channel * 2) =
          DTYPE == F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
    }
  }
};

// [B, Hq, Nq, D] of the caller: strides in elements, channels contiguous.
struct Output {
  u8* data;
  s64 batch_stride, head_stride, token_stride;

  template <Dtype DTYPE>
  __device__ __forceinline__ OutputRow<DTYPE> row(int batch, int head, int n) const {
    constexpr int BYTES = DTYPE == F32 ? 4 : 2;
    return {data + (batch * batch_stride + head * head_stride + n * token_stride) * BYTES};
  }
};

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

// [B, Hq, Nq, D] of the caller: strides in elements, channels contiguous.
struct Output {
  void* data;
  s64 batch_stride, head_stride, token_stride;

  // Channels `channel` and `channel` + 1 of a token.
  template <Dtype DTYPE>
  __device__ __forceinline__ void store(int batch, int head, int n, int channel, float x,
                                        float y) const {
    if constexpr (DTYPE == F16) {  // quantisation may carry a value past the largest input
      x = max_nan(min_nan(x, 65504.0f), -65504.0f);
      y = max_nan(min_nan(y, 65504.0f), -65504.0f);
    }
    store_unlimited<DTYPE>(batch, head, n, channel, x, y);
  }

  // The same for gradients, whose overflow must show: a loss scaler looks for infinities.
  template <Dtype DTYPE>
  __device__ __forceinline__ void store_unlimited(int batch, int head, int n, int channel, float x,
                                                  float y) const {
    const s64 element = batch * batch_stride + head * head_stride + n * token_stride + channel;
    if constexpr (DTYPE == F32) {
      *reinterpret_cast<float2*>(static_cast<float*>(data) + element) = make_float2(x, y);
    } else {
      *reinterpret_cast<u32*>(static_cast<u16*>(data) + element) =
          DTYPE == F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
    }
  }
};

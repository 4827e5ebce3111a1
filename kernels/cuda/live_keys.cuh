// Which keys take part in quantisation.
#pragma once

#include "types.cuh"

// Tokens that some query sees. The others take no part in means, ranges and scales, so that whatever
// padding holds cannot spoil the precision of the rest.
struct LiveKeys {
  const u8* data;  // null: all are live
  s64 batch_stride, head_stride;

  __device__ __forceinline__ bool operator()(int batch, int head, int n) const {
    return data == nullptr || data[batch * batch_stride + head * head_stride + n];
  }
};

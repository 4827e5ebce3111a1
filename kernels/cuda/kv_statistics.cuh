// Partial sums over tokens, written by the prologue and put together by the packing kernel.
#pragma once

#include "rows.cuh"

// Of one chunk of tokens of K or V of one (batch, key head): [3][HEAD_DIM] sums, minima, maxima,
// all times RANGE and the sums also over Nk, then the number of tokens that took part.
template <int HEAD_DIM>
constexpr int PARTIAL_FLOATS = 3 * HEAD_DIM + 4;

// Tokens that some query sees. The others take no part in means and scales, so that whatever
// padding holds cannot spoil the precision of the rest.
struct LiveKeys {
  const u8* data;  // null: all are live
  s64 batch_stride, head_stride;

  __device__ __forceinline__ bool operator()(int batch, int head, int n) const {
    return data == nullptr || data[batch * batch_stride + head * head_stride + n];
  }
};

// Which keys take part in quantisation, and how a block of threads reads them.
#pragma once

#include "rows.cuh"

// Tokens that some query sees. The others take no part in means, ranges and scales, so that whatever
// padding holds cannot spoil the precision of the rest.
struct LiveKeys {
  const u8* data;  // null: all are live
  s64 batch_stride, head_stride;

  __device__ __forceinline__ bool operator()(int batch, int head, int n) const {
    return data == nullptr || data[batch * batch_stride + head * head_stride + n];
  }

  // Of some tokens, those that are in `taken`; one branch for all of them.
  template <int N>
  __device__ __forceinline__ void narrow(bool (&taken)[N], int batch, int head,
                                         const int (&tokens)[N]) const {
    if (data == nullptr) return;
    const u8* of_head = data + batch * batch_stride + head * head_stride;
#pragma unroll
    for (int i = 0; i < N; ++i) taken[i] = taken[i] && of_head[tokens[i]];
  }
};

// take(octet) for the eight channels from `channel` on of every live token among first + row,
// first + row + ROWS ... before `end`; loads of AHEAD tokens are under way at a time.
template <Dtype DTYPE, int ROWS, int AHEAD, typename Take>
__device__ __forceinline__ void visit_tokens(const Tensor& source, const LiveKeys& live, int batch,
                                             int head, int first, int end, int row, int channel,
                                             Take take) {
  const char* from =
      source.token<DTYPE>(batch, head, first + row) + channel * ELEMENT_BYTES<DTYPE>;
  const s64 step = source.token_stride * (ROWS * ELEMENT_BYTES<DTYPE>);
  int n = first + row;
  for (; live.data == nullptr && n + (AHEAD - 1) * ROWS < end; n += ROWS * AHEAD) {
    Octet<DTYPE> octets[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a, from += step) octets[a].load(from);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) take(octets[a]);
  }
  for (; n < end; n += ROWS * AHEAD) {
    Octet<DTYPE> octets[AHEAD];
    bool taken[AHEAD];
    int tokens[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      tokens[a] = n + a * ROWS;
      taken[a] = tokens[a] < end;
    }
    live.narrow(taken, batch, head, tokens);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a, from += step) {
      if (taken[a]) octets[a].load(from);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (taken[a]) take(octets[a]);
    }
  }
}

// A live token of the `sample`-th of SAMPLES stretches of tokens; -1 if it has none. Where in a
// stretch varies by the golden ratio: a grid of tokens must not meet the rows of an image.
template <int SAMPLES>
__device__ __forceinline__ int choose_sample(const LiveKeys& live, int batch, int head, int tokens,
                                             int sample) {
  const u64 length = tokens;
  const int first = sample * length / SAMPLES, end = (sample + 1) * length / SAMPLES;
  const u64 position = (static_cast<u64>(sample) << 16) + (sample * 40503u & 0xffff);
  // A stretch may end within a token, which then belongs to the next one.
  int token = min(static_cast<int>((position * length / SAMPLES) >> 16), end - 1);
  for (int tried = first; tried < end; ++tried) {
    if (live(batch, head, token)) return token;
    token = token + 1 < end ? token + 1 : first;
  }
  return -1;
}

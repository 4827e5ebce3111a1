// Q and K to INT8, rotated, K less its mean; what both kernels that do it share.
//
// They take a kernel's Params `p`, whose `values` say what else is known of K and V. KeyBlocks: how
// blocks of K lie in memory, and which keys of one share a scale.
#pragma once

#include "live_keys.cuh"
#include "panels.cuh"
#include "token_sample.cuh"

constexpr int QUANTISE_THREADS = 256;
constexpr int QUANTISE_WARPS = QUANTISE_THREADS / 32;
constexpr int WARP_TOKENS = 16;
constexpr int Q_TOKENS = 256;  // per block of threads
constexpr int K_TOKENS = 512;  // likewise; each finds K's mean anew

// Of one block of K: 32-byte rows in panels of 32 channels, and a scale for each t of a quad.
struct KeyBlock {
  u8* codes;
  float* scales;
};

__device__ __forceinline__ int blocks_of_queries(int batch_heads, int q_len) {
  return batch_heads * ((q_len + Q_TOKENS - 1) / Q_TOKENS);
}

template <typename KeyBlocks>
__device__ __forceinline__ int parts_of_keys(int blocks) {
  return (blocks * KeyBlocks::KEYS + K_TOKENS - 1) / K_TOKENS;
}

// The channels of two tokens that this lane holds as QuadRows; those from head_dim on are zeros.
template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void load_rows(Octet<DTYPE> (&octets)[2][HEAD_DIM / 32],
                                          const Tensor& source, int batch, int head, int head_dim,
                                          const int (&tokens)[2]) {
  const int first = threadIdx.x % 4 * 8;
  const char* rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[r] = source.token<DTYPE>(batch, head, tokens[r]) + first * ELEMENT_BYTES<DTYPE>;
  }
  if (head_dim == HEAD_DIM) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
      octets[i % 2][i / 2].load(rows[i % 2] + i / 2 * (32 * ELEMENT_BYTES<DTYPE>));
    }
  } else {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
      octets[i % 2][i / 2].clear();
      if (i / 2 * 32 + first < head_dim) {
        octets[i % 2][i / 2].load(rows[i % 2] + i / 2 * (32 * ELEMENT_BYTES<DTYPE>));
      }
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE, typename Params>
__device__ void quantise_queries(const Params& p, u32 index) {
  const u32 parts = (p.q_len + Q_TOKENS - 1) / Q_TOKENS;
  const u32 batch_head = index / parts;
  const int part = index % parts, head = batch_head % p.q_heads, batch = batch_head / p.q_heads;
  const int lane = threadIdx.x % 32, t = lane % 4, last = p.q_len - 1;
  const HadamardTiles<DTYPE> hadamard;
  const int end = min((part + 1) * Q_TOKENS, p.q_len);
#pragma unroll 1
  for (int first = part * Q_TOKENS + threadIdx.x / 32 * WARP_TOKENS; first < end;
       first += QUANTISE_WARPS * WARP_TOKENS) {
    const int tokens[2] = {min(first + lane / 4, last), min(first + lane / 4 + 8, last)};
    Octet<DTYPE> octets[2][HEAD_DIM / 32];
    load_rows<HEAD_DIM, DTYPE>(octets, p.q, batch, head, p.values.head_dim, tokens);
    QuadRows<HEAD_DIM> rows;
    rows.rotate(octets, hadamard, [](int) { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float amax = max_nan(max_over_quad(rows.amax(r)), SMALLEST_AMAX);
      // A negative softmax scale goes into the codes: the attention kernel needs positive scales.
      const float inverse = copysignf(INT8_MAX / amax, p.score_factor);
      // Beyond the last token this is the last one again, by threads that write the same.
      const s64 row = static_cast<s64>(batch_head) * p.q_len + tokens[r];
      u8* codes = p.q_codes + row * HEAD_DIM + 8 * t;
#pragma unroll
      for (int c = 0; c < HEAD_DIM / 32; ++c) {
        *reinterpret_cast<uint2*>(codes + 32 * c) = rows.codes(r, c, inverse);
      }
      if (t == 0) p.q_scales[row] = rotated_scale<HEAD_DIM>(amax) * fabsf(p.score_factor);
    }
  }
}

// Mean of a sample of K's live tokens, times RANGE: any vector may be taken from all keys, as it
// leaves the softmax as it is; one near the mean makes the codes finest. start: what is to be added
// where rotation adds up, for K less its mean. Ends with a barrier.
template <int HEAD_DIM, Dtype DTYPE, typename Params>
__device__ void find_mean(const Params& p, int batch, int head, float (&mean)[HEAD_DIM],
                          float (&start)[HEAD_DIM]) {
  using Sample = TokenSample<HEAD_DIM, DTYPE, QUANTISE_THREADS>;
  __shared__ typename Sample::Shared shared;
  const auto& v = p.values;
  const Sample sample(shared, p.k, v.live, batch, head, v.kv_len, v.head_dim);
  const float average = sample.average(shared, [](float x, int) { return x; });
  if (threadIdx.x < HEAD_DIM) mean[threadIdx.x] = average;
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    constexpr int PRODUCT = 0b11101;  // bits of a channel's number that products rotate
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int other = (threadIdx.x & ~PRODUCT) | (i & 1) | (i & 14) << 1;
      const bool odd = __popc(threadIdx.x & other & PRODUCT) & 1;
      sum += odd ? mean[other] : -mean[other];
    }
    start[threadIdx.x] = sum;
  }
  __syncthreads();
}

template <int HEAD_DIM, Dtype DTYPE, typename KeyBlocks, typename Params>
__device__ void quantise_keys(const Params& p, u32 index) {
  __shared__ float mean[HEAD_DIM];
  __shared__ __align__(16) float start[HEAD_DIM];
  const auto& v = p.values;
  const u32 parts = parts_of_keys<KeyBlocks>(v.blocks);
  const u32 kv_head = index / parts;
  const int part = index % parts, head = kv_head % v.kv_heads, batch = kv_head / v.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const HadamardTiles<DTYPE> hadamard;
  find_mean<HEAD_DIM, DTYPE>(p, batch, head, mean, start);
  if (part == 0 && threadIdx.x < HEAD_DIM) {
    p.k_means[static_cast<s64>(kv_head) * HEAD_DIM + threadIdx.x] =
        mean[threadIdx.x] * (1.0f / RANGE);
  }

  // A warp takes the 16 keys that share a scale: those of one block and of one lane of the quads.
  constexpr int KEYS = KeyBlocks::KEYS, GROUPS = KEYS / WARP_TOKENS;
  const int group = warp % GROUPS;
  const int end = min((part + 1) * (K_TOKENS / KEYS), v.blocks);
  for (int block = part * (K_TOKENS / KEYS) + warp / GROUPS; block < end;
       block += QUANTISE_WARPS / GROUPS) {
    int in_block[2], keys[2];
    bool exists[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      in_block[r] = KeyBlocks::key(group, lane / 4 + 8 * r);
      keys[r] = block * KEYS + in_block[r];
      exists[r] = keys[r] < v.kv_len;
    }
    v.live.narrow(exists, batch, head, keys);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!exists[r]) keys[r] = 0;
    }
    Octet<DTYPE> octets[2][HEAD_DIM / 32];
    load_rows<HEAD_DIM, DTYPE>(octets, p.k, batch, head, v.head_dim, keys);
    QuadRows<HEAD_DIM> rows;
    rows.rotate(octets, hadamard, [&](int channel) {
      return *reinterpret_cast<const float4*>(start + channel);
    });
    if (__any_sync(0xffffffff, !exists[0] || !exists[1])) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) {
        float& x = rows.x[i % 2][i / 16][i / 2 % 8];
        if (!exists[i % 2]) x = 0.0f;
      }
    }
    const float largest = max_nan(rows.amax(0), rows.amax(1));
    float amax = max_over_quad(max_nan(largest, SMALLEST_AMAX));
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      amax = max_nan(amax, __shfl_xor_sync(0xffffffff, amax, distance));
    }

    const KeyBlock target =
        KeyBlocks::template at<HEAD_DIM>(p, static_cast<s64>(kv_head) * v.blocks + block);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int offset = panel_offset(KeyBlocks::row(in_block[r]), 8 * t);
#pragma unroll
      for (int c = 0; c < HEAD_DIM / 32; ++c) {
        *reinterpret_cast<uint2*>(target.codes + c * KeyBlocks::PANEL + offset) =
            rows.codes(r, c, INT8_MAX / amax);
      }
    }
    if (lane == 0) target.scales[group] = rotated_scale<HEAD_DIM>(amax);
  }
}

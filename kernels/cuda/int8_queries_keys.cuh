// Q and K to INT8, rotated, K less its mean; what both kernels that do it share.
//
// They take a kernel's Params `p`, whose `values` say what else is known of K and V. KeyBlocks: how
// blocks of K lie in memory, and which keys of one share a scale.
#pragma once

#include "live_keys.cuh"
#include "panels.cuh"

constexpr int QUANTISE_THREADS = 256;
constexpr int QUANTISE_WARPS = QUANTISE_THREADS / 32;
constexpr int WARP_TOKENS = 16;
constexpr int Q_TOKENS = QUANTISE_WARPS * WARP_TOKENS;  // per block of threads
constexpr int K_TOKENS = 512;                           // likewise; each finds K's mean anew
constexpr int K_SAMPLES = QUANTISE_WARPS * WARP_TOKENS;

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

// The channels of two tokens that this lane holds as QuadRows; zeros where a token is absent.
template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void load_rows(Octet<DTYPE> (&octets)[2][HEAD_DIM / 32],
                                          const Tensor& source, int batch, int head, int head_dim,
                                          const int (&tokens)[2], const bool (&exists)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const char* row = source.token<DTYPE>(batch, head, exists[r] ? tokens[r] : 0);
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
      const int channel = 32 * c + threadIdx.x % 4 * 8;
      octets[r][c].clear();
      if (exists[r] && channel < head_dim) {
        octets[r][c].load(row + channel * ELEMENT_BYTES<DTYPE>);
      }
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE, typename Params>
__device__ void quantise_queries(const Params& p, int index) {
  const int parts = (p.q_len + Q_TOKENS - 1) / Q_TOKENS;
  const int part = index % parts, head = index / parts % p.q_heads, batch = index / parts / p.q_heads;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const s64 first_row = (static_cast<s64>(batch) * p.q_heads + head) * p.q_len;
  const int first = part * Q_TOKENS + threadIdx.x / 32 * WARP_TOKENS + lane / 4;
  const int tokens[2] = {first, first + 8};
  const bool exists[2] = {tokens[0] < p.q_len, tokens[1] < p.q_len};
  Octet<DTYPE> octets[2][HEAD_DIM / 32];
  load_rows<HEAD_DIM, DTYPE>(octets, p.q, batch, head, p.values.head_dim, tokens, exists);
  QuadRows<HEAD_DIM> rows;
  rows.rotate(octets, HadamardTiles<DTYPE>());
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float amax = max_nan(max_over_quad(rows.amax(r)), SMALLEST_AMAX);
    // A negative softmax scale goes into the codes: the attention kernel needs positive scales.
    const float inverse = copysignf(INT8_MAX / amax, p.score_factor);
    if (!exists[r]) continue;
    u8* codes = p.q_codes + (first_row + tokens[r]) * HEAD_DIM + 8 * t;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
      *reinterpret_cast<uint2*>(codes + 32 * c) = rows.codes(r, c, inverse);
    }
    if (t == 0) {
      p.q_scales[first_row + tokens[r]] = rotated_scale<HEAD_DIM>(amax) * fabsf(p.score_factor);
    }
  }
}

// Mean of a sample of K's live tokens, rotated. Any vector may be taken from all keys, as it leaves
// the softmax as it is; one near the mean makes the codes finest. Ends with a barrier.
template <int HEAD_DIM, Dtype DTYPE, typename Params>
__device__ void find_mean(const Params& p, int batch, int head,
                          const HadamardTiles<DTYPE>& hadamard, float (&mean)[HEAD_DIM]) {
  __shared__ float sums[QUANTISE_WARPS][HEAD_DIM];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int tokens[2];
  bool exists[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int sample = warp * WARP_TOKENS + 8 * r + lane / 4;
    tokens[r] = choose_sample<K_SAMPLES>(p.values.live, batch, head, p.values.kv_len, sample);
    exists[r] = tokens[r] >= 0;
  }
  Octet<DTYPE> octets[2][HEAD_DIM / 32];
  load_rows<HEAD_DIM, DTYPE>(octets, p.k, batch, head, p.values.head_dim, tokens, exists);
  const int count = __syncthreads_count(exists[0]) + __syncthreads_count(exists[1]);
  const float share = 4.0f / max(count, 1);  // the four lanes of a quad counted one token each
  QuadRows<HEAD_DIM> rows;
  rows.rotate(octets, hadamard);
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 32; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = rows.x[0][c][i] * share + rows.x[1][c][i] * share;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
      }
      if (lane / 4 == i) sums[warp][32 * c + lane % 4 * 8 + i] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < QUANTISE_WARPS; ++w) sum += sums[w][threadIdx.x];
    mean[threadIdx.x] = sum;
  }
  __syncthreads();
}

template <int HEAD_DIM, Dtype DTYPE, typename KeyBlocks, typename Params>
__device__ void quantise_keys(const Params& p, int index) {
  __shared__ float mean[HEAD_DIM];
  const auto& v = p.values;
  const int parts = parts_of_keys<KeyBlocks>(v.blocks);
  const int part = index % parts, kv_head = index / parts;
  const int head = kv_head % v.kv_heads, batch = kv_head / v.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const HadamardTiles<DTYPE> hadamard;
  find_mean(p, batch, head, hadamard, mean);
  if (part == 0 && threadIdx.x < HEAD_DIM) {
    p.k_means[static_cast<s64>(kv_head) * HEAD_DIM + threadIdx.x] = mean[threadIdx.x];
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
      exists[r] = keys[r] < v.kv_len && v.live(batch, head, keys[r]);
    }
    Octet<DTYPE> octets[2][HEAD_DIM / 32];
    load_rows<HEAD_DIM, DTYPE>(octets, p.k, batch, head, v.head_dim, keys, exists);
    QuadRows<HEAD_DIM> rows;
    rows.rotate(octets, hadamard);
    float amax = SMALLEST_AMAX;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float m = mean[32 * c + 8 * t + i];
#pragma unroll
        for (int r = 0; r < 2; ++r) rows.x[r][c][i] = exists[r] ? rows.x[r][c][i] - m : 0.0f;
      }
    }
    amax = max_over_quad(max_nan(amax, max_nan(rows.amax(0), rows.amax(1))));
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

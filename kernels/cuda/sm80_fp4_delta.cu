// Third launch of FP4 attention: the scores that smoothing took from Q, mean(Q block) K^T from
// smoothed and unquantised K. FP16 factors, scaled to 1, and FP32 sums.
#include "fp4_layout.cuh"
#include "live_keys.cuh"

struct Params {
  Tensor k;
  LiveKeys live;
  const u16* q_means;         // [B, Hq, q_blocks][K_DIM], FP16
  const float* q_mean_units;  // [B, Hq, q_blocks]
  const float* kv_scales;     // [B, Hk, 2]
  const float* k_means;       // [B, Hk, HEAD_DIM]
  const float* k_sizes;       // [B, Hk]
  float* delta;               // [heads, row_blocks of this launch][kv_blocks] of DELTA_BYTES
  int q_heads, kv_heads, kv_len, head_dim;
  int q_blocks, q_block_tokens, kv_blocks;
  int first_head, first_q_block, launch_q_blocks;  // of this launch; heads of all batches
  int causal;
};

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int Q_BLOCKS = 16 * WARPS;  // per block of threads

// Smoothed keys in the order of the rows of a block of K. The padding puts the eight rows that a load
// of an operand reads into different banks.
template <int K_DIM>
struct Keys {
  u32 pairs[BLOCK_KEYS][K_DIM / 2 + 4];
};

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void load_keys(const Params& p, int key_block, int batch, s64 kv_head,
                                          Keys<KvBlock<HEAD_DIM>::K_DIM>& keys) {
  constexpr int OCTETS = KvBlock<HEAD_DIM>::K_DIM / 8;
  const int head = kv_head % p.kv_heads;
  const float* mean = p.k_means + kv_head * HEAD_DIM;
  const float inverse = 1.0f / (p.k_sizes[kv_head] * RANGE);
  for (int unit = threadIdx.x; unit < BLOCK_KEYS * OCTETS; unit += THREADS) {
    const int in_block = unit / OCTETS, channel = unit % OCTETS * 8;
    const int key = key_block * BLOCK_KEYS + in_block;
    const bool exists = channel < p.head_dim && key < p.kv_len && p.live(batch, head, key);
    Octet<DTYPE> octet;
    octet.clear();
    if (exists) {
      octet.load(p.k.token<DTYPE>(batch, head, key) + channel * ELEMENT_BYTES<DTYPE>);
    }
    u32* row = keys.pairs[row_of_key(in_block)];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float x[2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float center = exists ? mean[channel + i + e] * RANGE : 0.0f;
        x[e] = fmaf(octet[i + e], RANGE, -center) * inverse;
      }
      row[(channel + i) / 2] = pack_f16x2(x[0], x[1]);
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS)
sm80_fp4_delta(const __grid_constant__ Params p) {
  constexpr int K_DIM = KvBlock<HEAD_DIM>::K_DIM, STEPS = K_DIM / 16;
  __shared__ Keys<K_DIM> keys;
  const int tiles = (p.launch_q_blocks + Q_BLOCKS - 1) / Q_BLOCKS;
  const int key_block = blockIdx.x % p.kv_blocks, tile = blockIdx.x / p.kv_blocks % tiles;
  const int in_launch = blockIdx.x / p.kv_blocks / tiles, batch_head = in_launch + p.first_head;
  const int head = batch_head % p.q_heads, batch = batch_head / p.q_heads;
  const s64 kv_head = static_cast<s64>(batch) * p.kv_heads + head / (p.q_heads / p.kv_heads);
  const int tile_end = min((tile + 1) * Q_BLOCKS, p.launch_q_blocks) + p.first_q_block;
  if (p.causal && key_block * BLOCK_KEYS >= tile_end * p.q_block_tokens) return;  // in the future
  load_keys<HEAD_DIM, DTYPE>(p, key_block, batch, kv_head, keys);
  __syncthreads();

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = tile * Q_BLOCKS + threadIdx.x / 32 * 16;
  if (first >= p.launch_q_blocks) return;
  float unit[2];
  u32 a[STEPS][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_head = min(first + g + 8 * r, p.launch_q_blocks - 1) + p.first_q_block;
    const s64 q_block = static_cast<s64>(batch_head) * p.q_blocks + in_head;
    // From scaled keys to the units of K's codes and scales.
    unit[r] = p.q_mean_units[q_block] * (p.k_sizes[kv_head] / p.kv_scales[kv_head * 2]);
    const u32* means = reinterpret_cast<const u32*>(p.q_means + q_block * K_DIM);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      a[step][r] = means[8 * step + t];
      a[step][r + 2] = means[8 * step + 4 + t];
    }
  }
  float* target = p.delta + ((static_cast<s64>(in_launch) * p.launch_q_blocks + first + g) *
                                 p.kv_blocks + key_block) * (DELTA_BYTES / 4);
#pragma unroll
  for (int n = 0; n < BLOCK_KEYS / 8; ++n) {
    float d[4] = {};
    const u32* row = keys.pairs[8 * n + g];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      mma_16bit<F16>(d, a[step], {row[8 * step + t], row[8 * step + 4 + t]});
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first + g + 8 * r >= p.launch_q_blocks) continue;
      const float x = d[2 * r] * unit[r], y = d[2 * r + 1] * unit[r];
      float4* pairs = reinterpret_cast<float4*>(
          target + static_cast<s64>(8 * r) * p.kv_blocks * (DELTA_BYTES / 4));
      pairs[4 * n + t] = make_float4(x, y, x, y);
    }
  }
}

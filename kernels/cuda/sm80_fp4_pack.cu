// Second launch of FP4 attention: smooths, quantises and lays out K and V for the tensor cores.
#include "fp4_quantise.cuh"

struct Params {
  Tensor k, v;
  LiveKeys live;
  const float* partials;  // of the prologue
  u8* kv;                 // [B, Hk, blocks] of KvBlock, see fp4_layout.cuh
  float* kv_scales;       // [B, Hk, 2]: of all K and of all V
  float* k_means;         // [B, Hk, HEAD_DIM]
  float* v_means;         // [B, Hk, HEAD_DIM]
  int kv_heads, kv_len, head_dim;
  int chunks;
  int blocks;  // of BLOCK_KEYS keys
};

constexpr int THREADS = 256;

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void pack_keys(const Params& p, u8* target, int block, int head,
                                          int batch, const float* mean, float inverse) {
  using Block = KvBlock<HEAD_DIM>;
  constexpr int PARTS = Block::K_DIM / NVFP4_BLOCK;
  for (int unit = threadIdx.x; unit < BLOCK_KEYS * PARTS; unit += THREADS) {
    const int in_block = unit / PARTS, part = unit % PARTS;
    const int key = block * BLOCK_KEYS + in_block, row = row_of_key(in_block);
    float x[NVFP4_BLOCK] = {};
    if (key < p.kv_len && p.live(batch, head, key)) {
      load_channels<DTYPE>(x, p.k.token<DTYPE>(batch, head, key), part, p.head_dim, mean, inverse);
    }
    const Nvfp4Block quantised = quantise_block(x);
    u8* panel = target + part / 4 * Block::PANEL;
    *reinterpret_cast<uint2*>(panel + panel_offset(row, part % 4 * 8)) = quantised.codes;
    target[Block::K_SCALES + row * Block::K_SCALE_ROW + part] = quantised.scale;
  }
}

// 64 keys of 64 channels on their way from token-major to channel-major. Groups of 16 keys have their
// octets of channels in different places, so that lanes that read one column each meet all banks.
struct Turn {
  static constexpr int CHANNELS = 64;
  float values[BLOCK_KEYS][CHANNELS];

  __device__ __forceinline__ float& at(int key, int channel) {
    return values[key][channel ^ (key / NVFP4_BLOCK * 8)];
  }
};

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void pack_values(const Params& p, u8* target, int block, int head,
                                            int batch, const float* mean, float inverse,
                                            Turn& turn) {
  using Block = KvBlock<HEAD_DIM>;
  constexpr int OCTETS = Turn::CHANNELS / 8, GROUPS = BLOCK_KEYS / NVFP4_BLOCK;
  static_assert(THREADS == Turn::CHANNELS * GROUPS, "a thread takes one scale of a turn");
  for (int first = 0; first < HEAD_DIM; first += Turn::CHANNELS) {
    if (first > 0) __syncthreads();
#pragma unroll
    for (int unit = threadIdx.x; unit < BLOCK_KEYS * OCTETS; unit += THREADS) {
      const int in_block = unit / OCTETS, channel = unit % OCTETS * 8;
      const int key = block * BLOCK_KEYS + in_block;
      const bool exists =
          key < p.kv_len && first + channel < p.head_dim && p.live(batch, head, key);
      Octet<DTYPE> octet;
      octet.clear();
      if (exists) {
        octet.load(p.v.token<DTYPE>(batch, head, key) + (first + channel) * ELEMENT_BYTES<DTYPE>);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float smooth = exists ? fmaf(octet[i], RANGE, -mean[first + channel + i]) : 0.0f;
        turn.at(in_block, channel + i) = smooth * inverse;
      }
    }
    __syncthreads();
    const int channel = threadIdx.x / GROUPS, group = threadIdx.x % GROUPS;
    if (first + channel < HEAD_DIM) {
      float x[NVFP4_BLOCK];
#pragma unroll
      for (int i = 0; i < NVFP4_BLOCK; ++i) x[i] = turn.at(group * NVFP4_BLOCK + i, channel);
      const Nvfp4Block quantised = quantise_block(x);
      u8* codes = target + Block::V_CODES + panel_offset(first + channel, group * 8);
      *reinterpret_cast<uint2*>(codes) = quantised.codes;
      target[Block::V_SCALES + (first + channel) * GROUPS + group] = quantised.scale;
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, 3)
sm80_fp4_pack(const __grid_constant__ Params p) {
  __shared__ Smoothing<HEAD_DIM, THREADS> smoothing;
  __shared__ Turn turn;
  // One grid dimension, as the others end at 65535 heads or batches.
  const int block = blockIdx.x % p.blocks, values = blockIdx.x / p.blocks % 2;
  const int kv_head = blockIdx.x / p.blocks / 2;
  const int head = kv_head % p.kv_heads, batch = kv_head / p.kv_heads;
  const float* partials =
      p.partials + (kv_head * 2 + values) * static_cast<s64>(p.chunks) * PARTIAL_FLOATS<HEAD_DIM>;
  const float amax = smoothing.read(partials, p.chunks, p.kv_len, p.head_dim);
  if (block == 0 && threadIdx.x < HEAD_DIM) {
    float* means = (values ? p.v_means : p.k_means) + static_cast<s64>(kv_head) * HEAD_DIM;
    means[threadIdx.x] = smoothing.mean[threadIdx.x] * (1.0f / RANGE);
    if (threadIdx.x == 0) p.kv_scales[kv_head * 2 + values] = amax * (1.0f / (NVFP4_MAX * RANGE));
  }
  u8* target = p.kv + (static_cast<s64>(kv_head) * p.blocks + block) * KvBlock<HEAD_DIM>::BYTES;
  const float inverse = NVFP4_MAX / amax;
  if (values) {
    pack_values<HEAD_DIM, DTYPE>(p, target, block, head, batch, smoothing.mean, inverse, turn);
  } else {
    pack_keys<HEAD_DIM, DTYPE>(p, target, block, head, batch, smoothing.mean, inverse);
  }
}

// V of one head to NVFP4, less the mean of each channel, transposed.
#pragma once

#include "fp4_quantise.cuh"

struct Values {
  Tensor v;
  LiveKeys live;
  float* partials;   // of chunks of tokens, PARTIAL_FLOATS each
  u8* kv;            // [B, Hk, blocks], see fp4_layout.cuh
  float* kv_scales;  // [B, Hk, 2]: of all K and of all V
  float* v_means;    // [B, Hk, HEAD_DIM]
  int kv_heads, kv_len, head_dim;
  int blocks;  // of BLOCK_KEYS keys
  int chunks, chunk_tokens;
  int blocks_each;  // packed by one block of threads, which first needs all partials of its head

  __device__ __forceinline__ int packers() const {  // blocks of threads per head
    return (blocks + blocks_each - 1) / blocks_each;
  }
};

// 64 keys of 64 channels on their way from token-major to channel-major, as words of quantise_block.
// Groups of 16 keys have their octets of channels in different places, so that lanes that read one
// column each meet all banks.
struct Turn {
  static constexpr int CHANNELS = 64;
  u32 words[BLOCK_KEYS / 2][CHANNELS];

  __device__ __forceinline__ u32* at(int word, int channel) {
    return &words[word][channel ^ (word / NVFP4_WORDS * 8)];
  }
};

// Share `packer` of one head's blocks, whose partials are given; by all threads. Block: KvBlock or
// Int8KvBlock.
template <typename Block, int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void pack_values(const Values& p, const float* partials, int packer,
                                            s64 kv_head, Turn& turn) {
  constexpr int OCTETS = Turn::CHANNELS / 8, GROUPS = BLOCK_KEYS / NVFP4_BLOCK;
  static_assert(THREADS == Turn::CHANNELS * GROUPS, "a thread takes one scale of a turn");
  static_assert(THREADS == BLOCK_KEYS / 2 * OCTETS, "and eight words of it");
  static_assert(THREADS >= HEAD_DIM, "a thread takes one channel's mean");
  __shared__ float mean[HEAD_DIM], per_warp[THREADS / 32];
  const int head = kv_head % p.kv_heads, batch = kv_head / p.kv_heads;
  ChannelRange range;
  if (threadIdx.x < p.head_dim) {
    range.read<HEAD_DIM>(partials, p.chunks, p.kv_len, threadIdx.x);
  }
  if (threadIdx.x < HEAD_DIM) mean[threadIdx.x] = range.mean;
  const float amax =
      max_nan(max_over_block<THREADS>(range.deviation(), per_warp), SMALLEST_NVFP4_AMAX);
  if (packer == 0 && threadIdx.x < HEAD_DIM) {
    p.v_means[kv_head * HEAD_DIM + threadIdx.x] = range.mean * (1.0f / RANGE);
    if (threadIdx.x == 0) p.kv_scales[kv_head * 2 + 1] = amax * (1.0f / (NVFP4_MAX * RANGE));
  }
  const float inverse = NVFP4_MAX / amax;
  constexpr int TURNS = (HEAD_DIM + Turn::CHANNELS - 1) / Turn::CHANNELS;  // per block of keys
  const int first_turn = packer * p.blocks_each * TURNS;
  const int end_turn = min((packer + 1) * p.blocks_each, p.blocks) * TURNS;
  for (int index = first_turn; index < end_turn; ++index) {
    __syncthreads();
    const int block = index / TURNS, first = index % TURNS * Turn::CHANNELS;
    u8* target = p.kv + (kv_head * p.blocks + block) * Block::BYTES;
    const int word = threadIdx.x / OCTETS, octet_channel = threadIdx.x % OCTETS * 8;
    const int in_block = word / NVFP4_WORDS * NVFP4_BLOCK + first_of_word(word % NVFP4_WORDS);
    float x[2][8];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = block * BLOCK_KEYS + in_block + 4 * e;
      const bool exists =
          key < p.kv_len && first + octet_channel < p.head_dim && p.live(batch, head, key);
      Octet<DTYPE> octet;
      octet.clear();
      if (exists) {
        octet.load(p.v.token<DTYPE>(batch, head, key) +
                   (first + octet_channel) * ELEMENT_BYTES<DTYPE>);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float center = mean[first + octet_channel + i];
        x[e][i] = exists ? fmaf(octet[i], RANGE, -center) * inverse : 0.0f;
      }
    }
    uint4* words = reinterpret_cast<uint4*>(turn.at(word, octet_channel));
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      words[i / 4] = make_uint4(
          pack_f16x2(x[0][i], x[1][i]), pack_f16x2(x[0][i + 1], x[1][i + 1]),
          pack_f16x2(x[0][i + 2], x[1][i + 2]), pack_f16x2(x[0][i + 3], x[1][i + 3]));
    }
    __syncthreads();
    const int channel = threadIdx.x / GROUPS, group = threadIdx.x % GROUPS;
    if (first + channel < HEAD_DIM) {
      u32 pairs[NVFP4_WORDS];
#pragma unroll
      for (int i = 0; i < NVFP4_WORDS; ++i) pairs[i] = *turn.at(group * NVFP4_WORDS + i, channel);
      const Nvfp4Block quantised = quantise_block(pairs);
      u8* codes = target + Block::V_CODES + panel_offset(first + channel, group * 8);
      *reinterpret_cast<uint2*>(codes) = quantised.codes;
      target[Block::V_SCALES + (first + channel) * GROUPS + group] = quantised.scale;
    }
  }
}

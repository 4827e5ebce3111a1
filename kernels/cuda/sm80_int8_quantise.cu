// First launch of INT8 attention: Q and K to codes, and of V what one reading of it allows: all of
// it where every block can find the ranges of its channels alone, else those of chunks of tokens.
#include "int8_queries_keys.cuh"
#include "int8_values.cuh"

struct Params {
  Tensor q, k;
  Values values;
  u8* q_codes;      // [B, Hq, Nq, HEAD_DIM]
  float* q_scales;  // [B, Hq, Nq], times the softmax scale and log2(e)
  u8* k_codes;      // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM]
  float* k_scales;  // [B, Hk, blocks, SCALES_PER_BLOCK]
  float* k_means;   // [B, Hk, HEAD_DIM]
  int batch, q_heads, q_len;
  float score_factor;  // softmax scale * log2(e)
};

constexpr int THREADS = VALUE_THREADS;
static_assert(THREADS == QUANTISE_THREADS, "Q, K and V share a launch");

// See int8_layout.cuh. TILE_KEYS: keys whose rows lie together in a panel.
template <int TILE_KEYS>
struct KeyBlocks {
  static constexpr int KEYS = BLOCK_KEYS, PANEL = TILE_KEYS * 32, TILE = TILE_KEYS / BLOCK_KEYS;

  static __device__ __forceinline__ int key(int scale, int member) {
    return member / 4 * 16 + scale * 4 + member % 4;
  }
  static __device__ __forceinline__ int row(int key) { return row_of_key(key); }

  template <int HEAD_DIM>
  static __device__ __forceinline__ KeyBlock at(const Params& p, s64 index) {
    // Every head has an even number of blocks, so that none lies in a tile of the next one.
    u8* tile = p.k_codes + index / TILE * (TILE * BLOCK_KEYS * HEAD_DIM);
    return {tile + index % TILE * (BLOCK_KEYS * 32), p.k_scales + index * SCALES_PER_BLOCK};
  }
};

template <int HEAD_DIM, Dtype DTYPE>
__device__ void begin_values(const Values& p, int index, int parts) {
  __shared__ ValueChannels<HEAD_DIM> shared;
  const int part = index % parts, kv_head = index / parts;
  const int head = kv_head % p.kv_heads, batch = kv_head / p.kv_heads;
  if (p.chunks == 0) {
    find_ranges<HEAD_DIM, DTYPE>(p, batch, head, 0, p.kv_len, shared);
    choose_scales(p, kv_head, part == 0, shared);
    pack_values<HEAD_DIM, DTYPE>(p, batch, head, kv_head, part, shared);
  } else {
    const int first = part * p.chunk_tokens;
    find_ranges<HEAD_DIM, DTYPE>(p, batch, head, first, min(first + p.chunk_tokens, p.kv_len),
                                 shared);
    if (threadIdx.x < HEAD_DIM) {
      float* ranges = p.ranges + static_cast<s64>(index) * 2 * HEAD_DIM + threadIdx.x;
      ranges[0] = shared.low[threadIdx.x], ranges[HEAD_DIM] = shared.high[threadIdx.x];
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE>
constexpr int MIN_BLOCKS = HEAD_DIM * ELEMENT_BYTES<DTYPE> <= 256 ? 2 : 1;

// V comes last: what is read last is what the next launch finds in L2.
template <int HEAD_DIM, Dtype DTYPE, int TILE_KEYS>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<HEAD_DIM, DTYPE>)
sm80_int8_quantise(const __grid_constant__ Params p) {
  const Values& v = p.values;
  const int k_blocks = p.batch * v.kv_heads * parts_of_keys<KeyBlocks<TILE_KEYS>>(v.blocks);
  const int q_blocks = blocks_of_queries(p.batch * p.q_heads, p.q_len);
  const int index = blockIdx.x;
  if (index < k_blocks) {
    quantise_keys<HEAD_DIM, DTYPE, KeyBlocks<TILE_KEYS>>(p, index);
  } else if (index < k_blocks + q_blocks) {
    quantise_queries<HEAD_DIM, DTYPE>(p, index - k_blocks);
  } else {
    const int parts =
        v.chunks ? v.chunks : (v.blocks * BLOCK_KEYS + VALUE_TOKENS - 1) / VALUE_TOKENS;
    begin_values<HEAD_DIM, DTYPE>(v, index - k_blocks - q_blocks, parts);
  }
}

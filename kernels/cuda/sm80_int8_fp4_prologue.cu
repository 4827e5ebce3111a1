// First launch of attention with INT8 scores and FP4 values: Q and K to INT8, and of V what its
// quantising needs to know of all tokens.
#include "fp4_values.cuh"
#include "int8_queries_keys.cuh"

struct Params {
  Tensor q, k;
  Values values;
  u8* q_codes;      // [B, Hq, Nq, HEAD_DIM]
  float* q_scales;  // [B, Hq, Nq], times the softmax scale and log2(e)
  float* k_means;   // [B, Hk, HEAD_DIM]
  int batch, q_heads, q_len;
  float score_factor;  // softmax scale * log2(e)
};
static_assert(THREADS == QUANTISE_THREADS, "Q, K and V share a launch");

// See fp4_layout.cuh.
struct KeyBlocks {
  static constexpr int KEYS = BLOCK_KEYS, PANEL = KEYS * 32;

  static __device__ __forceinline__ int key(int scale, int member) {
    return member / 8 * 32 + scale * 8 + member % 8;
  }
  static __device__ __forceinline__ int row(int key) { return row_of_key(key); }

  template <int HEAD_DIM>
  static __device__ __forceinline__ KeyBlock at(const Params& p, s64 index) {
    using Block = Int8KvBlock<HEAD_DIM>;
    u8* block = p.values.kv + index * Block::BYTES;
    return {block, reinterpret_cast<float*>(block + Block::K_SCALES)};
  }
};

template <int HEAD_DIM, Dtype DTYPE>
constexpr int MIN_BLOCKS = HEAD_DIM * ELEMENT_BYTES<DTYPE> <= 256 ? 2 : 1;

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<HEAD_DIM, DTYPE>)
sm80_int8_fp4_prologue(const __grid_constant__ Params p) {
  const Values& v = p.values;
  const int k_blocks = p.batch * v.kv_heads * parts_of_keys<KeyBlocks>(v.blocks);
  const int q_blocks = blocks_of_queries(p.batch * p.q_heads, p.q_len);
  int index = blockIdx.x;
  if (index < k_blocks) {
    quantise_keys<HEAD_DIM, DTYPE, KeyBlocks>(p, index);
  } else if (index < k_blocks + q_blocks) {
    quantise_queries<HEAD_DIM, DTYPE>(p, index - k_blocks);
  } else {
    index -= k_blocks + q_blocks;
    const int chunk = index % v.chunks, kv_head = index / v.chunks;
    reduce_chunk<HEAD_DIM, DTYPE>(v.v, v.live, kv_head / v.kv_heads, kv_head % v.kv_heads, chunk,
                                  v.chunk_tokens, v.kv_len, v.head_dim,
                                  v.partials + static_cast<s64>(index) * PARTIAL_FLOATS<HEAD_DIM>);
  }
}

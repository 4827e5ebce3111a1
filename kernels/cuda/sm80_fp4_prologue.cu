// First launch of FP4 attention: what quantising needs to know of all tokens.
#include "fp4_balance.cuh"

struct Params {
  Tensor q, k, v;
  LiveKeys live;
  float* partials;    // [B, Hk, 2 (K, V), chunks, PARTIAL_FLOATS]
  float* deviations;  // of K's heads, then of Q's: [B, Hk, HEAD_DIM], [B, Hq, HEAD_DIM]
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int chunks, chunk_tokens;
  int reductions;  // B * Hk * 2 * chunks; the blocks after these find deviations
  int k_samples;   // B * Hk of them in K; the others in Q
};

template <int HEAD_DIM, Dtype DTYPE>
constexpr int MIN_BLOCKS = HEAD_DIM * ELEMENT_BYTES<DTYPE> <= 512 ? 2 : 1;

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<HEAD_DIM, DTYPE>)
sm80_fp4_prologue(const __grid_constant__ Params p) {
  int index = blockIdx.x;
  if (index < p.reductions) {
    const int chunk = index % p.chunks, which = index / p.chunks % 2;
    const int kv_head = index / p.chunks / 2;
    reduce_chunk<HEAD_DIM, DTYPE>(which ? p.v : p.k, p.live, kv_head / p.kv_heads,
                                  kv_head % p.kv_heads, chunk, p.chunk_tokens, p.kv_len, p.head_dim,
                                  p.partials + static_cast<s64>(index) * PARTIAL_FLOATS<HEAD_DIM>);
    return;
  }
  index -= p.reductions;
  float* deviations = p.deviations + static_cast<s64>(index) * HEAD_DIM;
  const bool keys = index < p.k_samples;
  const int head = keys ? index : index - p.k_samples, heads = keys ? p.kv_heads : p.q_heads;
  find_deviations<HEAD_DIM, DTYPE>(keys ? p.k : p.q, keys ? p.live : LiveKeys{}, head / heads,
                                   head % heads, keys ? p.kv_len : p.q_len, p.head_dim, deviations);
}

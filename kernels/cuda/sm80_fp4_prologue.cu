// First launch of FP4 attention: what quantising needs to know of all tokens of Q, K and V.
#include "fp4_quantise.cuh"

struct Params {
  Tensor q, k, v;
  LiveKeys live;
  float* q_partials;   // [B, Hq, q_chunks, PARTIAL_FLOATS]
  float* kv_partials;  // [B, Hk, 2 (K, V), kv_chunks, PARTIAL_FLOATS]
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int q_chunks, q_chunk_tokens, kv_chunks, kv_chunk_tokens;
  int kv_reductions;  // B * Hk * 2 * kv_chunks; the blocks after these take Q
};

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, 2)
sm80_fp4_prologue(const __grid_constant__ Params p) {
  int index = blockIdx.x;
  const bool queries = index >= p.kv_reductions;
  if (queries) index -= p.kv_reductions;
  const int chunks = queries ? p.q_chunks : p.kv_chunks;
  const int heads = queries ? p.q_heads : p.kv_heads;
  const int chunk = index % chunks;
  int head = index / chunks;
  const bool values = !queries && head % 2;
  if (!queries) head /= 2;
  float* partials = queries ? p.q_partials : p.kv_partials;
  reduce_chunk<HEAD_DIM, DTYPE>(queries ? p.q : values ? p.v : p.k, queries ? LiveKeys{} : p.live,
                                head / heads, head % heads, chunk,
                                queries ? p.q_chunk_tokens : p.kv_chunk_tokens,
                                queries ? p.q_len : p.kv_len, p.head_dim,
                                partials + static_cast<s64>(index) * PARTIAL_FLOATS<HEAD_DIM>);
}

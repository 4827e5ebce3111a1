// First launch of SageBwd's backward pass: what its products that sum over tokens read, and what it
// has to know of each query. A block of threads takes 32 tokens of one head: of dO and Q, or of K.
#include "mask.cuh"
#include "sagebwd_tile.cuh"
#include "token_codes.cuh"

struct Params {
  Tensor d_out, out;     // [B, Hq, Nq, D]
  const u8* q_codes;     // [B, Hq, Nq, HEAD_DIM]
  const float* q_scales; // [B, Hq, Nq]
  const float* lse;      // [B, Hq, Nq] of the scores of smoothed K, natural logarithm
  const u8* k_codes;     // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  u8* d_out_transposed;  // [B, Hq, panels, HEAD_DIM * TILE_TOKENS]
  u8* q_transposed;      // likewise
  u8* k_transposed;      // [B, Hk, 2 * blocks, HEAD_DIM * TILE_TOKENS]
  Query* queries;        // [B, Hq, panels * TILE_TOKENS]
  int batch, q_heads, kv_heads, q_len, head_dim;
  int blocks;  // of K per (batch, key head)
};

constexpr int THREADS = 4 * TILE_TOKENS;

// Four threads share a query.
template <int HEAD_DIM, Dtype DTYPE>
__device__ void prepare_queries(const Params& p, int index) {
  __shared__ TokenCodes<HEAD_DIM, TILE_TOKENS, THREADS> q, d_out;
  const int panels = (p.q_len + TILE_TOKENS - 1) / TILE_TOKENS;
  const int panel = index % panels, row = index / panels;  // of all heads of all batches
  const int head = row % p.q_heads, batch = row / p.q_heads;
  const int in_panel = threadIdx.x / 4, t = threadIdx.x % 4;
  const int token = panel * TILE_TOKENS + in_panel;
  const s64 place = static_cast<s64>(row) * p.q_len + token;
  const float lse = token < p.q_len ? p.lse[place] : -FLOAT_MAX;
  // A row of the lowest finite biases alone has no log-sum-exp in FP32; it gets no gradient either.
  const bool seen = !(lse <= -FLOAT_MAX);

  Octet<DTYPE> octets[HEAD_DIM / 32];
  float amax = SMALLEST_AMAX, delta = 0.0f;
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 32; ++c) {
    const int channel = 32 * c + 8 * t;
    Octet<DTYPE> out;
    octets[c].clear(), out.clear();
    if (seen && channel < p.head_dim) {
      octets[c].load(p.d_out.token<DTYPE>(batch, head, token) + channel * ELEMENT_BYTES<DTYPE>);
      out.load(p.out.token<DTYPE>(batch, head, token) + channel * ELEMENT_BYTES<DTYPE>);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      amax = max_nan(amax, fabsf(octets[c][i]));
      delta = fmaf(octets[c][i], out[i], delta);
    }
  }
  amax = max_over_quad(amax);
  delta += __shfl_xor_sync(0xffffffff, delta, 1);
  delta += __shfl_xor_sync(0xffffffff, delta, 2);

  const float inverse = INT8_MAX / amax;
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 32; ++c) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      u32 b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = round_to_byte(octets[c][4 * w + i], inverse, MAGIC);
      const int word = 8 * c + 2 * t + w;
      d_out.words[in_panel][word] = pack_bytes(b[0], b[1], b[2], b[3]);
      q.words[in_panel][word] =
          seen ? reinterpret_cast<const u32*>(p.q_codes + place * HEAD_DIM)[word] : 0;
    }
  }
  const s64 target = static_cast<s64>(row) * panels + panel;
  if (t == 0) {
    Query query{0.0f, -as_float(NEGATIVE_INFINITY_BITS), 0.0f, 0.0f};
    if (seen) query = {p.q_scales[place], lse * LOG2_E, delta, amax * (1.0f / INT8_MAX)};
    p.queries[target * TILE_TOKENS + in_panel] = query;
  }
  __syncthreads();
  q.store_transposed(p.q_transposed + target * (HEAD_DIM * TILE_TOKENS));
  d_out.store_transposed(p.d_out_transposed + target * (HEAD_DIM * TILE_TOKENS));
}

template <int HEAD_DIM>
__device__ void prepare_keys(const Params& p, int index) {
  __shared__ TokenCodes<HEAD_DIM, TILE_TOKENS, THREADS> k;
  const u8* block = p.k_codes + static_cast<s64>(index / 2) * (BLOCK_KEYS * HEAD_DIM);
#pragma unroll
  for (int i = threadIdx.x; i < TILE_TOKENS * HEAD_DIM / 4; i += THREADS) {
    const int token = i / (HEAD_DIM / 4), word = i % (HEAD_DIM / 4);
    const int row = row_of_key(index % 2 * TILE_TOKENS + token);
    k.words[token][word] = *reinterpret_cast<const u32*>(
        block + word / 8 * (BLOCK_KEYS * 32) + panel_offset(row, word % 8 * 4));
  }
  __syncthreads();
  k.store_transposed(p.k_transposed + static_cast<s64>(index) * (HEAD_DIM * TILE_TOKENS));
}

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS)
sm80_sagebwd_prepare(const __grid_constant__ Params p) {
  const int k_panels = p.batch * p.kv_heads * 2 * p.blocks;
  const int index = blockIdx.x;
  if (index < k_panels) {
    prepare_keys<HEAD_DIM>(p, index);
  } else {
    prepare_queries<HEAD_DIM, DTYPE>(p, index - k_panels);
  }
}

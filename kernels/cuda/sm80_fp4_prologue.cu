// First launch of FP4 attention: smooths and quantises Q, and reduces K and V over their tokens.
#include "fp4_quantise.cuh"

struct Params {
  Tensor q, k, v;
  LiveKeys live;
  u8* q_codes;       // [B, Hq, Nq][K_DIM / 2], see fp4_layout.cuh
  u8* q_scales;      // [B, Hq, Nq][K_DIM / 16]
  float2* q_factors;  // [B, Hq, q_blocks]: scales times the size of score_factor, and limits
  u16* q_means;      // [B, Hq, q_blocks][K_DIM]: FP16, in units of q_mean_units
  float* q_mean_units;  // [B, Hq, q_blocks], in units of Q's codes and scales
  float* partials;   // [B, Hk, 2 (K, V), chunks, PARTIAL_FLOATS]
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int chunks, chunk_tokens;
  int reduction_blocks;  // B * Hk * 2 * chunks; the blocks after these quantise Q
  int q_blocks, q_block_tokens;
  int smooth_q;
  float score_factor;  // softmax scale * log2(e)
};

constexpr int THREADS = 256;

// A score as an exponent of two. FP32 tells its neighbours apart by a quarter; beyond, a row's maximum
// could not be taken off without losing it. Larger scores are scaled down, which leaves all weight
// where it is: on one key.
constexpr float LARGEST_EXPONENT = 4194304.0f;  // 2^22

// Beside a mean this many times larger, a block's deviations are rounding errors.
constexpr float SMALLEST_DEVIATION = 1.0f / 4096;

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void quantise_queries(const Params& p, int index,
                                                 TokenReduction<HEAD_DIM, THREADS>& reduction) {
  constexpr int K_DIM = KvBlock<HEAD_DIM>::K_DIM, BLOCKS = K_DIM / NVFP4_BLOCK;  // of a token
  __shared__ float mean[K_DIM], per_warp[2][THREADS / 32];
  const int block = index % p.q_blocks, batch_head = index / p.q_blocks;
  const int head = batch_head % p.q_heads, batch = batch_head / p.q_heads;
  const int first = min(block * p.q_block_tokens, p.q_len);
  const int end = min(first + p.q_block_tokens, p.q_len);

  const LiveKeys all{};
  reduction.template reduce<DTYPE>(p.q, all, batch, head, first, end, p.head_dim,
                                   1.0f / max(end - first, 1));
  float found = 0.0f, amax = 0.0f;
  if (threadIdx.x < p.head_dim && first < end) {
    const auto channel = reduction.channel(threadIdx.x);
    if (p.smooth_q) found = channel.sum;
    amax = max_nan(channel.high - found, found - channel.low);
  }
  if (threadIdx.x < K_DIM) mean[threadIdx.x] = found;
  const float mean_amax = max_over_block<THREADS>(fabsf(found), per_warp[0]);
  amax = max_over_block<THREADS>(amax, per_warp[1]);
  amax = max_nan(max_nan(amax, mean_amax * SMALLEST_DEVIATION), SMALLEST_NVFP4_AMAX);
  // A negative softmax scale goes into the codes: the attention kernel needs positive factors.
  const float inverse = copysignf(NVFP4_MAX / amax, p.score_factor);
  const float mean_unit = max_nan(mean_amax, SMALLEST_NVFP4_AMAX);
  if (threadIdx.x < K_DIM) {
    const float x = copysignf(1.0f, p.score_factor) * found / mean_unit;
    p.q_means[static_cast<s64>(index) * K_DIM + threadIdx.x] = pack_f16x2(x, 0.0f);
  }
  if (threadIdx.x == 0) {
    const float units = mean_unit * (NVFP4_MAX / amax);
    p.q_factors[index] = make_float2(amax * (1.0f / (NVFP4_MAX * RANGE)) * fabsf(p.score_factor),
                                     LARGEST_EXPONENT / (K_DIM * NVFP4_MAX) / (NVFP4_MAX + units));
    p.q_mean_units[index] = units;
  }

  const s64 head_row = static_cast<s64>(batch_head) * p.q_len;
  for (int unit = threadIdx.x; unit < (end - first) * BLOCKS; unit += THREADS) {
    const int n = first + unit / BLOCKS, part = unit % BLOCKS;
    float x[NVFP4_BLOCK];
    load_channels<DTYPE>(x, p.q.token<DTYPE>(batch, head, n), part, p.head_dim, mean, inverse);
    const Nvfp4Block quantised = quantise_block(x);
    const s64 target = (head_row + n) * BLOCKS + part;
    reinterpret_cast<uint2*>(p.q_codes)[target] = quantised.codes;
    p.q_scales[target] = quantised.scale;
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void reduce_keys_or_values(
    const Params& p, int index, TokenReduction<HEAD_DIM, THREADS>& reduction) {
  const int chunk = index % p.chunks, which = index / p.chunks % 2;
  const int head = index / p.chunks / 2 % p.kv_heads, batch = index / p.chunks / 2 / p.kv_heads;
  const int first = chunk * p.chunk_tokens;
  reduction.template reduce<DTYPE>(which ? p.v : p.k, p.live, batch, head, first,
                                   min(first + p.chunk_tokens, p.kv_len), p.head_dim,
                                   1.0f / p.kv_len);
  if (threadIdx.x >= HEAD_DIM) return;
  const auto channel = reduction.channel(threadIdx.x);
  float* partial = p.partials + static_cast<s64>(index) * PARTIAL_FLOATS<HEAD_DIM>;
  partial[threadIdx.x] = channel.sum;
  partial[HEAD_DIM + threadIdx.x] = channel.low;
  partial[2 * HEAD_DIM + threadIdx.x] = channel.high;
  if (threadIdx.x == 0) partial[3 * HEAD_DIM] = static_cast<float>(channel.tokens);
}

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, 2)
sm80_fp4_prologue(const __grid_constant__ Params p) {
  __shared__ TokenReduction<HEAD_DIM, THREADS> reduction;
  const int index = blockIdx.x;
  if (index < p.reduction_blocks) {
    reduce_keys_or_values<HEAD_DIM, DTYPE>(p, index, reduction);
  } else {
    quantise_queries<HEAD_DIM, DTYPE>(p, index - p.reduction_blocks, reduction);
  }
}

// Second launch of FP4 attention: smooths, quantises and lays out Q, K and V for the tensor cores.
#include "fp4_balance.cuh"
#include "fp4_values.cuh"

struct Params {
  Tensor q, k;
  Values values;         // its partials: of K and V, [B, Hk, 2, chunks]
  const float* k_deviations;  // [B, Hk, HEAD_DIM]
  const float* q_deviations;  // [B, Hq, HEAD_DIM]
  u8* q_codes;           // [B, Hq, Nq][K_DIM / 2], see fp4_layout.cuh
  u8* q_scales;          // [B, Hq, Nq][K_DIM / 16]
  float2* q_factors;     // [B, Hq, q_blocks]: scales times the size of score_factor, and limits
  u16* q_means;          // [B, Hq, q_blocks][K_DIM]: FP16, in units of q_mean_units
  float* q_mean_units;   // [B, Hq, q_blocks], in units of Q's codes and scales
  float* k_means;        // [B, Hk, HEAD_DIM]
  float* k_sizes;        // [B, Hk]: largest deviation from k_means
  int q_heads, q_len;
  int q_blocks, q_block_tokens;
  int kv_launch;  // blocks of threads that take K and V; those after them take Q
  int smooth_q;
  float score_factor;  // softmax scale * log2(e)
};

// A score as an exponent of two. FP32 tells its neighbours apart by a quarter; beyond, a row's maximum
// could not be taken off without losing it. Larger scores are scaled down, which leaves all weight
// where it is: on one key.
constexpr float LARGEST_EXPONENT = 4194304.0f;  // 2^22

// Beside a mean this many times larger, a block's deviations are rounding errors.
constexpr float SMALLEST_DEVIATION = 1.0f / 4096;

template <int HEAD_DIM>
__device__ __forceinline__ Deviations read_deviations(const Params& p, s64 kv_head) {
  const int group = p.q_heads / p.values.kv_heads;
  Deviations deviations;
  deviations.read<HEAD_DIM>(p.k_deviations + kv_head * HEAD_DIM,
                            p.q_deviations + kv_head * group * HEAD_DIM, group);
  return deviations;
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void pack_keys(const Params& p, int packer, s64 kv_head,
                                          Rotated<HEAD_DIM>& rotated) {
  using Block = KvBlock<HEAD_DIM>;
  using Parts = Rotated<HEAD_DIM>;
  __shared__ float per_warp[THREADS / 32];
  const Values& v = p.values;
  const Deviations deviations = read_deviations<HEAD_DIM>(p, kv_head);
  ChannelRange k;
  if (threadIdx.x < v.head_dim) {
    const float* partials = v.partials + kv_head * 2 * v.chunks * PARTIAL_FLOATS<HEAD_DIM>;
    k.read<HEAD_DIM>(partials, v.chunks, v.kv_len, threadIdx.x);
  }
  const float balance = deviations.balance();
  const float norm = norm_over_block(k.deviation() / balance, SMALLEST_NORM);
  if (packer == 0) {
    const float size = max_over_block<THREADS>(k.deviation(), per_warp);
    if (threadIdx.x < HEAD_DIM) {
      p.k_means[kv_head * HEAD_DIM + threadIdx.x] = k.mean * (1.0f / RANGE);
    }
    if (threadIdx.x == 0) {
      p.k_sizes[kv_head] = max_nan(size, SMALLEST_NVFP4_AMAX) * (1.0f / RANGE);
      v.kv_scales[kv_head * 2] = norm * (1.0f / (NVFP4_MAX * RANGE));
    }
  }
  rotated.set_channel(k.mean, 1.0f / balance, norm);
  __syncthreads();
  const int head = kv_head % v.kv_heads, batch = kv_head / v.kv_heads;
  static_assert(BLOCK_KEYS * Parts::PARTS % THREADS == 0, "rotation wants whole warps");
  static_assert(THREADS % Parts::PARTS == 0, "a thread takes the same channels of all its keys");
  const int part = threadIdx.x % Parts::PARTS;
  typename Parts::Part channels;
  rotated.read(channels, part);
  const int end = min((packer + 1) * v.blocks_each, v.blocks) * BLOCK_KEYS;
  for (int key = packer * v.blocks_each * BLOCK_KEYS + threadIdx.x / Parts::PARTS; key < end;
       key += THREADS / Parts::PARTS) {
    const int block = key / BLOCK_KEYS, row = row_of_key(key % BLOCK_KEYS);
    u8* target = v.kv + (kv_head * v.blocks + block) * Block::BYTES;
    const bool exists = key < v.kv_len && v.live(batch, head, key);
    u32 x[NVFP4_WORDS];
    Parts::template load<DTYPE>(x, channels, p.k.token<DTYPE>(batch, head, exists ? key : 0), exists,
                                part, v.head_dim);
#pragma unroll
    for (int i = 0; i < NVFP4_WORDS; ++i) x[i] = exists ? x[i] : 0;
    const Nvfp4Block quantised = quantise_block(x);
    u8* panel = target + part / 4 * PANEL;
    *reinterpret_cast<uint2*>(panel + panel_offset(row, part % 4 * 8)) = quantised.codes;
    target[Block::K_SCALES + row * Block::K_SCALE_ROW + part] = quantised.scale;
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void pack_queries(const Params& p, int index,
                                             Rotated<HEAD_DIM>& rotated,
                                             TokenReduction<HEAD_DIM, THREADS>& reduction) {
  using Parts = Rotated<HEAD_DIM>;
  constexpr int K_DIM = Parts::DIM;
  __shared__ float per_warp[2][THREADS / 32];
  const Values& v = p.values;
  const int block = index % p.q_blocks, batch_head = index / p.q_blocks;
  const int head = batch_head % p.q_heads, batch = batch_head / p.q_heads;
  const int group = p.q_heads / v.kv_heads;
  const int first = min(block * p.q_block_tokens, p.q_len);
  const int end = min(first + p.q_block_tokens, p.q_len);
  const Deviations deviations = read_deviations<HEAD_DIM>(p, batch_head / group);
  const LiveKeys all{};
  reduction.template reduce<DTYPE>(p.q, all, batch, head, first, end, v.head_dim,
                                   1.0f / max(end - first, 1));
  const float balance = deviations.balance();
  float mean = 0.0f, deviation = 0.0f;
  if (threadIdx.x < v.head_dim && first < end) {
    const auto channel = reduction.channel(threadIdx.x);
    if (p.smooth_q) mean = channel.sum;
    deviation = max_nan(channel.high - mean, mean - channel.low);
  }
  const float largest_mean = max_over_block<THREADS>(fabsf(mean), per_warp[0]);
  const float largest_balanced = max_over_block<THREADS>(fabsf(mean) * balance, per_warp[1]);
  const float norm = norm_over_block(
      deviation * balance, max_nan(largest_balanced * SMALLEST_DEVIATION, SMALLEST_NORM));
  // A negative softmax scale goes into the codes: the attention kernel needs positive factors.
  const float sign = copysignf(1.0f, p.score_factor);
  rotated.set_channel(mean, sign * balance, norm);
  const float mean_unit = max_nan(largest_mean, SMALLEST_NVFP4_AMAX);
  if (threadIdx.x < K_DIM) {
    p.q_means[static_cast<s64>(index) * K_DIM + threadIdx.x] =
        pack_f16x2(sign * mean / mean_unit, 0.0f);
  }
  if (threadIdx.x == 0) {
    // Neither a product of codes nor what the mean adds is above the product of norms.
    constexpr float ROOT = K_DIM == 64 ? 8.0f : K_DIM == 128 ? 11.313708499f : 16.0f;
    const float largest = NVFP4_MAX * (2.0f + ROOT * largest_balanced / norm);
    p.q_factors[index] = make_float2(norm * (1.0f / (NVFP4_MAX * RANGE)) * fabsf(p.score_factor),
                                     LARGEST_EXPONENT / NVFP4_MAX / largest);
    p.q_mean_units[index] = mean_unit * (NVFP4_MAX / norm);
  }
  __syncthreads();
  const s64 head_row = static_cast<s64>(batch_head) * p.q_len;
  const int part = threadIdx.x % Parts::PARTS;
  typename Parts::Part channels;
  rotated.read(channels, part);
  for (int turn = first; turn < end; turn += THREADS / Parts::PARTS) {
    const int n = turn + threadIdx.x / Parts::PARTS;
    const bool exists = n < end;
    u32 x[NVFP4_WORDS];
    Parts::template load<DTYPE>(x, channels, p.q.token<DTYPE>(batch, head, exists ? n : 0), exists,
                                part, v.head_dim);
    const Nvfp4Block quantised = quantise_block(x);
    if (!exists) continue;
    const s64 target = (head_row + n) * Parts::PARTS + part;
    reinterpret_cast<uint2*>(p.q_codes)[target] = quantised.codes;
    p.q_scales[target] = quantised.scale;
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, DTYPE == F32 ? 2 : 3)
sm80_fp4_pack(const __grid_constant__ Params p) {
  __shared__ Rotated<HEAD_DIM> rotated;
  __shared__ union {
    TokenReduction<HEAD_DIM, THREADS> reduction;
    Turn turn;
  } scratch;
  const Values& v = p.values;
  const int index = blockIdx.x;
  if (index >= p.kv_launch) {
    pack_queries<HEAD_DIM, DTYPE>(p, index - p.kv_launch, rotated, scratch.reduction);
    return;
  }
  const int packer = index % v.packers(), head = index / v.packers();
  const s64 kv_head = head / 2;
  if (head % 2) {
    const float* partials = v.partials + static_cast<s64>(head) * v.chunks * PARTIAL_FLOATS<HEAD_DIM>;
    pack_values<KvBlock<HEAD_DIM>, HEAD_DIM, DTYPE>(v, partials, packer, kv_head, scratch.turn);
  } else {
    pack_keys<HEAD_DIM, DTYPE>(p, packer, kv_head, rotated);
  }
}

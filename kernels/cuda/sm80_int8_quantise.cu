// First launch of INT8 attention: Q and K to codes, and of V what one reading of it allows: all of
// it where every block can find the ranges of its channels alone, else those of chunks of tokens.
#include "int8_values.cuh"

struct Params {
  Tensor q, k;
  Values values;
  u8* q_codes;      // [B, Hq, Nq, HEAD_DIM]
  float* q_scales;  // [B, Hq, Nq], times the softmax scale and log2(e)
  u8* k_codes;      // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM]
  float* k_scales;  // [B, Hk, blocks, SCALES_PER_BLOCK]
  float* k_means;   // [B, Hk, HEAD_DIM], rotated and times RANGE
  int batch, q_heads, q_len;
  float score_factor;  // softmax scale * log2(e)
};

constexpr int THREADS = VALUE_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int WARP_TOKENS = 16;
constexpr int Q_TOKENS = WARPS * WARP_TOKENS;  // per block of threads
constexpr int K_TOKENS = 512;                  // likewise; each finds K's mean anew
constexpr int K_SAMPLES = WARPS * WARP_TOKENS;

// The channels of two tokens that this lane holds as QuadRows; zeros where a token is absent.
template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void load_rows(Octet<DTYPE> (&octets)[2][HEAD_DIM / 32],
                                          const Tensor& source, int batch, int head, int head_dim,
                                          const int (&tokens)[2], const bool (&exists)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const char* row = source.token<DTYPE>(batch, head, exists[r] ? tokens[r] : 0);
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
      const int channel = 32 * c + threadIdx.x % 4 * 8;
      octets[r][c].clear();
      if (exists[r] && channel < head_dim) {
        octets[r][c].load(row + channel * ELEMENT_BYTES<DTYPE>);
      }
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ void quantise_queries(const Params& p, int index) {
  const int parts = (p.q_len + Q_TOKENS - 1) / Q_TOKENS;
  const int part = index % parts, head = index / parts % p.q_heads, batch = index / parts / p.q_heads;
  const int lane = threadIdx.x % 32, t = lane % 4;
  const s64 first_row = (static_cast<s64>(batch) * p.q_heads + head) * p.q_len;
  const int first = part * Q_TOKENS + threadIdx.x / 32 * WARP_TOKENS + lane / 4;
  const int tokens[2] = {first, first + 8};
  const bool exists[2] = {tokens[0] < p.q_len, tokens[1] < p.q_len};
  Octet<DTYPE> octets[2][HEAD_DIM / 32];
  load_rows<HEAD_DIM, DTYPE>(octets, p.q, batch, head, p.values.head_dim, tokens, exists);
  QuadRows<HEAD_DIM> rows;
  rows.rotate(octets, HadamardTiles<DTYPE>());
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float amax = max_nan(max_over_quad(rows.amax(r)), SMALLEST_AMAX);
    // A negative softmax scale goes into the codes: the attention kernel needs positive scales.
    const float inverse = copysignf(INT8_MAX / amax, p.score_factor);
    if (!exists[r]) continue;
    u8* codes = p.q_codes + (first_row + tokens[r]) * HEAD_DIM + 8 * t;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
      *reinterpret_cast<uint2*>(codes + 32 * c) = rows.codes(r, c, inverse);
    }
    if (t == 0) {
      p.q_scales[first_row + tokens[r]] = rotated_scale<HEAD_DIM>(amax) * fabsf(p.score_factor);
    }
  }
}

// A live token of the `sample`-th of K_SAMPLES stretches of tokens; -1 if it has none. Where in a
// stretch varies by the golden ratio: a grid of tokens must not meet the rows of an image.
__device__ int choose_sample(const Values& p, int batch, int head, int sample) {
  const u64 length = p.kv_len;
  const int first = sample * length / K_SAMPLES, end = (sample + 1) * length / K_SAMPLES;
  const u64 position = (static_cast<u64>(sample) << 16) + (sample * 40503u & 0xffff);
  int token = (position * length / K_SAMPLES) >> 16;
  for (int tried = first; tried < end; ++tried) {
    if (p.live(batch, head, token)) return token;
    token = token + 1 < end ? token + 1 : first;
  }
  return -1;
}

// Mean of a sample of K's live tokens, rotated. Any vector may be taken from all keys, as it leaves
// the softmax as it is; one near the mean makes the codes finest. Ends with a barrier.
template <int HEAD_DIM, Dtype DTYPE>
__device__ void find_mean(const Params& p, int batch, int head,
                          const HadamardTiles<DTYPE>& hadamard, float (&mean)[HEAD_DIM]) {
  __shared__ float sums[WARPS][HEAD_DIM];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int tokens[2];
  bool exists[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    tokens[r] = choose_sample(p.values, batch, head, warp * WARP_TOKENS + 8 * r + lane / 4);
    exists[r] = tokens[r] >= 0;
  }
  Octet<DTYPE> octets[2][HEAD_DIM / 32];
  load_rows<HEAD_DIM, DTYPE>(octets, p.k, batch, head, p.values.head_dim, tokens, exists);
  const int count = __syncthreads_count(exists[0]) + __syncthreads_count(exists[1]);
  const float share = 4.0f / max(count, 1);  // the four lanes of a quad counted one token each
  QuadRows<HEAD_DIM> rows;
  rows.rotate(octets, hadamard);
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 32; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = rows.x[0][c][i] * share + rows.x[1][c][i] * share;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
      }
      if (lane / 4 == i) sums[warp][32 * c + lane % 4 * 8 + i] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w][threadIdx.x];
    mean[threadIdx.x] = sum;
  }
  __syncthreads();
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ void quantise_keys(const Params& p, int index) {
  __shared__ float mean[HEAD_DIM];
  const Values& v = p.values;
  const int parts = (v.blocks * BLOCK_KEYS + K_TOKENS - 1) / K_TOKENS;
  const int part = index % parts, kv_head = index / parts;
  const int head = kv_head % v.kv_heads, batch = kv_head / v.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const HadamardTiles<DTYPE> hadamard;
  find_mean(p, batch, head, hadamard, mean);
  if (part == 0 && threadIdx.x < HEAD_DIM) {
    p.k_means[static_cast<s64>(kv_head) * HEAD_DIM + threadIdx.x] = mean[threadIdx.x];
  }

  // A warp takes the 16 keys that share a scale: those of one block and of one lane of the quads.
  const int group = warp % SCALES_PER_BLOCK;
  const int end = min((part + 1) * (K_TOKENS / BLOCK_KEYS), v.blocks);
  for (int block = part * (K_TOKENS / BLOCK_KEYS) + warp / SCALES_PER_BLOCK; block < end;
       block += WARPS / SCALES_PER_BLOCK) {
    int in_block[2], keys[2];
    bool exists[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int member = lane / 4 + 8 * r;
      in_block[r] = member / 4 * 16 + group * 4 + member % 4;
      keys[r] = block * BLOCK_KEYS + in_block[r];
      exists[r] = keys[r] < v.kv_len && v.live(batch, head, keys[r]);
    }
    Octet<DTYPE> octets[2][HEAD_DIM / 32];
    load_rows<HEAD_DIM, DTYPE>(octets, p.k, batch, head, v.head_dim, keys, exists);
    QuadRows<HEAD_DIM> rows;
    rows.rotate(octets, hadamard);
    float amax = SMALLEST_AMAX;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float m = mean[32 * c + 8 * t + i];
#pragma unroll
        for (int r = 0; r < 2; ++r) rows.x[r][c][i] = exists[r] ? rows.x[r][c][i] - m : 0.0f;
      }
    }
    amax = max_over_quad(max_nan(amax, max_nan(rows.amax(0), rows.amax(1))));
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      amax = max_nan(amax, __shfl_xor_sync(0xffffffff, amax, distance));
    }

    const s64 target = static_cast<s64>(kv_head) * v.blocks + block;
    u8* codes = p.k_codes + target * (BLOCK_KEYS * HEAD_DIM);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int offset = panel_offset(row_of_key(in_block[r]), 8 * t);
#pragma unroll
      for (int c = 0; c < HEAD_DIM / 32; ++c) {
        *reinterpret_cast<uint2*>(codes + c * (BLOCK_KEYS * 32) + offset) =
            rows.codes(r, c, INT8_MAX / amax);
      }
    }
    if (lane == 0) p.k_scales[target * SCALES_PER_BLOCK + group] = rotated_scale<HEAD_DIM>(amax);
  }
}

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
template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<HEAD_DIM, DTYPE>)
sm80_int8_quantise(const __grid_constant__ Params p) {
  const Values& v = p.values;
  const int k_blocks = p.batch * v.kv_heads * ((v.blocks * BLOCK_KEYS + K_TOKENS - 1) / K_TOKENS);
  const int q_blocks = p.batch * p.q_heads * ((p.q_len + Q_TOKENS - 1) / Q_TOKENS);
  const int index = blockIdx.x;
  if (index < k_blocks) {
    quantise_keys<HEAD_DIM, DTYPE>(p, index);
  } else if (index < k_blocks + q_blocks) {
    quantise_queries<HEAD_DIM, DTYPE>(p, index - k_blocks);
  } else {
    const int parts =
        v.chunks ? v.chunks : (v.blocks * BLOCK_KEYS + VALUE_TOKENS - 1) / VALUE_TOKENS;
    begin_values<HEAD_DIM, DTYPE>(v, index - k_blocks - q_blocks, parts);
  }
}

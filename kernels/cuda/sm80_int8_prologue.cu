// First launch of INT8 attention: quantises Q and reduces K and V over their tokens.
#include "kv_statistics.cuh"

struct Params {
  Tensor q, k, v;
  LiveKeys live;
  u8* q_codes;      // [B, Hq, Nq, HEAD_DIM]
  float* q_scales;  // [B, Hq, Nq], times the softmax scale and log2(e)
  float* partials;  // [B, Hk, 2 (K, V), chunks, PARTIAL_FLOATS]
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int chunks, chunk_tokens;
  int reduction_blocks;  // B * Hk * 2 * chunks; the blocks after these quantise Q
  int q_blocks;          // per (batch, query head)
  float score_factor;    // softmax scale * log2(e)
};

constexpr int THREADS = 256;
constexpr int Q_TOKENS = 128;  // per block
constexpr int PASS_TOKENS = THREADS / 4;  // a quad takes one token at a time

template <int HEAD_DIM, Dtype DTYPE>
__device__ void quantise_queries(const Params& p, int index) {
  const int block = index % p.q_blocks, head = index / p.q_blocks % p.q_heads;
  const int batch = index / p.q_blocks / p.q_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const s64 first_row = (static_cast<s64>(batch) * p.q_heads + head) * p.q_len;

#pragma unroll
  for (int pass = 0; pass < Q_TOKENS / PASS_TOKENS; ++pass) {
    const int n = block * Q_TOKENS + pass * PASS_TOKENS + warp * 8 + lane / 4;
    const bool exists = n < p.q_len;
    const char* source = p.q.token<DTYPE>(batch, head, exists ? n : 0);
    QuadRow<HEAD_DIM> row;
#pragma unroll
    for (int c = 0; c < row.CHUNKS; ++c) {
      const int channel = 32 * c + 8 * t;
      Octet<DTYPE> octet;
      octet.clear();
      if (channel < p.head_dim) octet.load(source + channel * ELEMENT_BYTES<DTYPE>);
#pragma unroll
      for (int i = 0; i < 8; ++i) row.x[c][i] = octet[i] * RANGE;
    }
    row.rotate(t);
    const float amax = max_nan(max_over_quad(row.amax()), SMALLEST_AMAX);
    // A negative softmax scale goes into the codes: the attention kernel needs positive scales.
    const float inverse = copysignf(INT8_MAX / amax, p.score_factor);
    if (exists) {
      u8* codes = p.q_codes + (first_row + n) * HEAD_DIM + 8 * t;
#pragma unroll
      for (int c = 0; c < row.CHUNKS; ++c) {
        *reinterpret_cast<uint2*>(codes + 32 * c) = row.codes(c, inverse);
      }
      if (t == 0) {
        p.q_scales[first_row + n] = rotated_scale<HEAD_DIM>(amax) * fabsf(p.score_factor);
      }
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ void reduce_tokens(const Params& p, int index) {
  constexpr int OCTETS = HEAD_DIM / 8;
  constexpr int ROWS = THREADS / OCTETS;  // of threads; each takes every ROWS-th token
  constexpr int AHEAD = 4;                // tokens whose loads are under way at a time
  __shared__ float shared[3][ROWS][HEAD_DIM];
  __shared__ int shared_count[ROWS];

  const int chunk = index % p.chunks, which = index / p.chunks % 2;
  const int head = index / p.chunks / 2 % p.kv_heads, batch = index / p.chunks / 2 / p.kv_heads;
  const Tensor& source = which ? p.v : p.k;
  const int octet_index = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
  const bool has_channels = row < ROWS && 8 * octet_index < p.head_dim;
  const int first = chunk * p.chunk_tokens;
  const int end = min(first + p.chunk_tokens, p.kv_len);
  const float share = RANGE / p.kv_len;

  float sum[8], low[8], high[8];
  int count = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = 0.0f, low[i] = FLOAT_MAX, high[i] = -FLOAT_MAX;
  for (int n = first + row; has_channels && n < end; n += ROWS * AHEAD) {
    Octet<DTYPE> octets[AHEAD];
    bool live[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int token = n + a * ROWS;
      live[a] = token < end && p.live(batch, head, token);
      if (live[a]) {
        octets[a].load(source.token<DTYPE>(batch, head, token) +
                       8 * octet_index * ELEMENT_BYTES<DTYPE>);
      }
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (!live[a]) continue;
      ++count;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = octets[a][i];
        sum[i] = fmaf(x, share, sum[i]);
        low[i] = min_nan(low[i], x);
        high[i] = max_nan(high[i], x);
      }
    }
  }

  if (row < ROWS) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int channel = 8 * octet_index + i;
      shared[0][row][channel] = sum[i];
      shared[1][row][channel] = low[i] * RANGE;
      shared[2][row][channel] = high[i] * RANGE;
    }
    if (octet_index == 0) shared_count[row] = count;
  }
  __syncthreads();
  float* partial = p.partials + static_cast<s64>(index) * PARTIAL_FLOATS<HEAD_DIM>;
  const int channel = threadIdx.x;
  if (channel < HEAD_DIM) {
    float total = 0.0f, lowest = FLOAT_MAX, highest = -FLOAT_MAX;
    int tokens = 0;
    for (int r = 0; r < ROWS; ++r) {
      total += shared[0][r][channel];
      lowest = min_nan(lowest, shared[1][r][channel]);
      highest = max_nan(highest, shared[2][r][channel]);
      tokens += shared_count[r];
    }
    partial[channel] = total;
    partial[HEAD_DIM + channel] = lowest;
    partial[2 * HEAD_DIM + channel] = highest;
    if (channel == 0) partial[3 * HEAD_DIM] = static_cast<float>(tokens);
  }
}

// 80 registers, which three blocks leave, are too few for tokens of FP32.
template <int HEAD_DIM, Dtype DTYPE>
constexpr int MIN_BLOCKS = HEAD_DIM <= 128 && DTYPE != F32 ? 3 : 2;

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<HEAD_DIM, DTYPE>)
sm80_int8_prologue(const __grid_constant__ Params p) {
  const int index = blockIdx.x;
  if (index < p.reduction_blocks) {
    reduce_tokens<HEAD_DIM, DTYPE>(p, index);
  } else {
    quantise_queries<HEAD_DIM, DTYPE>(p, index - p.reduction_blocks);
  }
}

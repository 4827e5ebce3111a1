// First launch of SageBwd's backward pass on wgmma: tiles of queries and of keys as its products read
// them. A block of threads makes one tile, four threads a token.
#include "mask.cuh"
#include "sagebwd_group_tiles.cuh"
#include "token_codes.cuh"

struct Params {
  Tensor d_out, out;      // [B, Hq, Nq, D]
  Tensor v;               // [B, Hk, Nk, D]
  const u8* q_codes;      // [B, Hq, Nq, HEAD_DIM]
  const float* q_scales;  // [B, Hq, Nq]
  const float* lse;       // [B, Hq, Nq] of the scores of smoothed K, natural logarithm
  const u8* k_codes;      // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  const float* k_scales;  // [B, Hk, blocks, SCALES_PER_BLOCK]
  u8* query_tiles;        // [B, Hq, tiles, QueryTile::BYTES]
  u8* key_tiles;          // [B, Hk, blocks, KeyTile::BYTES]
  int batch, q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K per (batch, key head)
};

constexpr int THREADS = 4 * TILE_TOKENS;
static_assert(TILE_TOKENS == BLOCK_KEYS, "a block of K is a tile");

// A token's eight channels from 32c + 8t on, as they lie in a tile's values.
template <Dtype DTYPE>
__device__ __forceinline__ void store_values(u8* values, const Octet<DTYPE>& octet, int row, int c,
                                             int t) {
  *reinterpret_cast<uint4*>(values + c / 2 * VALUE_PANEL + value_offset(row, c % 2 * 4 + t)) =
      make_uint4(octet.words[0], octet.words[1], octet.words[2], octet.words[3]);
}

// What dS of a query is multiplied by, whose codes' scale is `own`: not far below the others of the
// tile, which would leave it few bits (DsTile), nor so small that dS would vanish.
__device__ __forceinline__ float slope_scale(float own) {
  constexpr float LARGEST_OF_OTHERS = 0.25f, SMALLEST = 1e-14f;
  __shared__ float most[THREADS / 32];
  float largest = own;
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2) {
    largest = max_nan(largest, __shfl_xor_sync(0xffffffff, largest, lane));
  }
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) largest = max_nan(largest, most[warp]);
  return max_nan(max_nan(own, largest * LARGEST_OF_OTHERS), SMALLEST);
}

// Four codes, rounded anew to `ratio` of what they are.
__device__ __forceinline__ u32 round_codes(u32 codes, float ratio) {
  u32 b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const s32 code = static_cast<s32>(codes << (24 - 8 * i)) >> 24;
    b[i] = round_to_byte(static_cast<float>(code), ratio, MAGIC);
  }
  return pack_bytes(b[0], b[1], b[2], b[3]);
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ void prepare_queries(const Params& p, int index) {
  using Tile = QueryTile<HEAD_DIM>;
  __shared__ TokenCodes<HEAD_DIM, TILE_TOKENS, THREADS> q;
  const int tiles = (p.q_len + TILE_TOKENS - 1) / TILE_TOKENS;
  const int row = index / tiles;  // of all heads of all batches
  const int head = row % p.q_heads, batch = row / p.q_heads;
  const int in_tile = threadIdx.x / 4, t = threadIdx.x % 4, tile_row = row_of_key(in_tile);
  const int token = index % tiles * TILE_TOKENS + in_tile;
  const s64 place = static_cast<s64>(row) * p.q_len + token;
  const float lse = token < p.q_len ? p.lse[place] : -FLOAT_MAX;
  // A row of the lowest finite biases alone has no log-sum-exp in FP32; it gets no gradient either.
  const bool seen = !(lse <= -FLOAT_MAX);
  u8* target = p.query_tiles + static_cast<s64>(index) * Tile::BYTES;
  const float q_scale = seen ? p.q_scales[place] : 0.0f, scale = slope_scale(q_scale);
  const float ratio = q_scale / scale;

  float delta = 0.0f;
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 32; ++c) {
    const int channel = 32 * c + 8 * t;
    Octet<DTYPE> d_out, out;
    d_out.clear(), out.clear();
    if (seen && channel < p.head_dim) {
      d_out.load(p.d_out.token<DTYPE>(batch, head, token) + channel * ELEMENT_BYTES<DTYPE>);
      out.load(p.out.token<DTYPE>(batch, head, token) + channel * ELEMENT_BYTES<DTYPE>);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) delta = fmaf(d_out[i], out[i], delta);
    store_values(target + Tile::VALUES, d_out, tile_row, c, t);
    const int word = 8 * c + 2 * t;
    uint2 codes = make_uint2(0, 0);
    if (seen) codes = *reinterpret_cast<const uint2*>(p.q_codes + place * HEAD_DIM + 4 * word);
    q.words[in_tile][word] = round_codes(codes.x, ratio);
    q.words[in_tile][word + 1] = round_codes(codes.y, ratio);
    *reinterpret_cast<uint2*>(target + Tile::CODES + c * CODE_PANEL +
                              panel_offset(tile_row, 8 * t)) = codes;
  }
  delta += __shfl_xor_sync(0xffffffff, delta, 1);
  delta += __shfl_xor_sync(0xffffffff, delta, 2);
  if (t == 0) {
    float shift = as_float(NEGATIVE_INFINITY_BITS), slope = 0.0f;
    if (seen) shift = -lse * LOG2_E - LOG2_P_UNIT<DTYPE>, slope = scale * P_UNIT<DTYPE>;
    float* facts = reinterpret_cast<float*>(target + Tile::FACTS) + in_tile;
    facts[Q_SCALE * TILE_TOKENS] = q_scale, facts[SHIFT * TILE_TOKENS] = shift;
    facts[SLOPE * TILE_TOKENS] = slope, facts[OFFSET * TILE_TOKENS] = -delta * slope;
  }
  __syncthreads();
  q.store_transposed(target + Tile::TRANSPOSED);
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ void prepare_keys(const Params& p, int index) {
  using Tile = KeyTile<HEAD_DIM>;
  const u8* codes = p.k_codes + static_cast<s64>(index) * (BLOCK_KEYS * HEAD_DIM);
  u8* target = p.key_tiles + static_cast<s64>(index) * Tile::BYTES;
  const int head = index / p.blocks % p.kv_heads, batch = index / p.blocks / p.kv_heads;
  const int in_tile = threadIdx.x / 4, t = threadIdx.x % 4, row = row_of_key(in_tile);
  const int token = index % p.blocks * TILE_TOKENS + in_tile;
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 32; ++c) {
    const int channel = 32 * c + 8 * t, offset = c * CODE_PANEL + panel_offset(row, 8 * t);
    const uint2 words = *reinterpret_cast<const uint2*>(codes + offset);
    *reinterpret_cast<uint2*>(target + Tile::CODES + offset) = words;
    Octet<BF16> numbers;
    numbers.words[0] = bf16x2_of_bytes<0, 1>(words.x);
    numbers.words[1] = bf16x2_of_bytes<2, 3>(words.x);
    numbers.words[2] = bf16x2_of_bytes<0, 1>(words.y);
    numbers.words[3] = bf16x2_of_bytes<2, 3>(words.y);
    store_values(target + Tile::NUMBERS, numbers, row, c, t);
    Octet<DTYPE> octet;
    octet.clear();
    if (token < p.kv_len && channel < p.head_dim) {
      octet.load(p.v.token<DTYPE>(batch, head, token) + channel * ELEMENT_BYTES<DTYPE>);
    }
    store_values(target + Tile::VALUES, octet, row, c, t);
  }
  if (threadIdx.x < SCALES_PER_BLOCK) {
    reinterpret_cast<float*>(target + Tile::SCALES)[threadIdx.x] =
        p.k_scales[static_cast<s64>(index) * SCALES_PER_BLOCK + threadIdx.x];
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS)
sm90_sagebwd_prepare(const __grid_constant__ Params p) {
  const int key_tiles = p.batch * p.kv_heads * p.blocks;
  const int index = blockIdx.x;
  if (index < key_tiles) {
    prepare_keys<HEAD_DIM, DTYPE>(p, index);
  } else {
    prepare_queries<HEAD_DIM, DTYPE>(p, index - key_tiles);
  }
}

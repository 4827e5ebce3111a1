// Third launch of SageBwd's backward pass: dK and dV. A block of threads takes some keys of one key
// head and goes through the queries that share it, 32 at a time, head after head: nothing is added
// up in an order that could vary.
#include "output.cuh"
#include "sagebwd_warp.cuh"

struct Params {
  const u8* q_codes;           // [B, Hq, Nq, HEAD_DIM]
  const u8* q_transposed;      // [B, Hq, panels, HEAD_DIM * TILE_TOKENS]
  const u8* d_out_transposed;  // likewise
  const Query* queries;        // [B, Hq, panels * TILE_TOKENS]
  const u8* k_codes;           // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  const float* k_scales;       // [B, Hk, blocks, SCALES_PER_BLOCK]
  Tensor d_out, v;             // [B, Hq, Nq, D], [B, Hk, Nk, D]
  Mask mask;                   // transposed: its rows are keys, its columns queries
  Output d_k, d_v;             // [B, Hk, Nk, D]
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K per (batch, key head)
  int causal;
};

// Offsets of a tile's parts in shared memory, in bytes.
template <int HEAD_DIM>
struct Stage {
  using Bytes = TileBytes<HEAD_DIM>;
  static constexpr int SCORES = 0, VALUES = Bytes::SCORES, Q = VALUES + Bytes::VALUES;
  static constexpr int D_OUT = Q + Bytes::TRANSPOSED, QUERIES = D_OUT + Bytes::TRANSPOSED;
  static constexpr int SIZE = QUERIES + TILE_TOKENS * sizeof(Query);
};

// What the two rows of a lane are.
struct KeyRows {
  float k_scale[2];
  int key[2];
  s64 mask_row[2];  // of the head at hand
};

// P, times the scales of dO, and dS, times those of Q, of 16 keys and a tile of queries.
template <bool MASKED, bool HIDDEN, typename Rows>
__device__ __forceinline__ void find_p_and_ds(float (&p)[2][TILE_TOKENS / 4],
                                              float (&d_s)[2][TILE_TOKENS / 4],
                                              const typename Rows::Tile& s,
                                              const typename Rows::Values& d_p, u32 queries,
                                              const KeyRows& rows, const Mask& mask,
                                              int first_query, int q_len, bool causal) {
#pragma unroll
  for (int pair = 0; pair < Rows::PAIRS; ++pair) {
    const int in_tile = 16 * pair + 4 * Rows::t(), query = first_query + in_tile;
    float bias[2][4] = {};
    if constexpr (MASKED) {
      read_mask(bias[0], mask, rows.mask_row[0], query, q_len);
      read_mask(bias[1], mask, rows.mask_row[1], query, q_len);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float facts[4];  // of a Query
      load_shared_floats(facts, queries + (in_tile + i) * sizeof(Query));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = 2 * pair + i / 2, x = 2 * r + i % 2;
        const float factor = min_nan(facts[0] * rows.k_scale[r], LARGEST_FACTOR);
        float exponent = fmaf(as_float(s[n][x]) - MAGIC, factor, -facts[1]);
        if constexpr (MASKED) exponent += bias[r][i];
        const float probability = exp2_approx(exponent);
        const float slope = probability * (d_p[n][x] - facts[2]);
        const bool hidden =
            HIDDEN && ((causal && rows.key[r] > query + i) || probability == 0.0f);
        p[r][4 * pair + i] = hidden ? 0.0f : probability * facts[3];
        d_s[r][4 * pair + i] = hidden ? 0.0f : slope * facts[0];
      }
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void store(const Output& target, const float (&x)[HEAD_DIM / 8][4],
                                      float factor, int batch, int head, const KeyRows& rows,
                                      int kv_len, int head_dim) {
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int channel = 8 * n + threadIdx.x % 4 * 2;
      if (rows.key[r] < kv_len && channel < head_dim) {
        target.store_unlimited<DTYPE>(batch, head, rows.key[r], channel, x[n][2 * r] * factor,
                                      x[n][2 * r + 1] * factor);
      }
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE, int WARPS, bool MASKED>
__global__ void __launch_bounds__(32 * WARPS)
sm80_sagebwd_key_gradients(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  // With 128 channels the sums of dK and dV take half of the registers.
  using Rows = BackwardRows<HEAD_DIM, DTYPE, (HEAD_DIM > 96)>;
  using S = Stage<HEAD_DIM>;
  using Copies = TileCopies<HEAD_DIM, 32 * WARPS>;
  constexpr int BLOCK_ROWS = WARPS * WARP_ROWS;
  const int row_blocks = (p.kv_len + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int row_block = blockIdx.x % row_blocks;
  const int kv_head = blockIdx.x / row_blocks % p.kv_heads;
  const int batch = blockIdx.x / row_blocks / p.kv_heads;
  const int first_row = row_block * BLOCK_ROWS + threadIdx.x / 32 * WARP_ROWS;
  const s64 kv_row = static_cast<s64>(batch) * p.kv_heads + kv_head;
  const int group = p.q_heads / p.kv_heads, panels = (p.q_len + TILE_TOKENS - 1) / TILE_TOKENS;
  // Queries before the first key of the block see none of it in a causal call.
  const int first_tile = p.causal ? row_block * BLOCK_ROWS / TILE_TOKENS : 0;
  const int tiles = panels - first_tile, turns = group * tiles;

  const u32 start = shared_address_of(shared);
  auto fetch = [&](int turn) {
    const u32 stage = start + turn % 2 * S::SIZE;
    const int head = kv_head * group + turn / tiles, tile = first_tile + turn % tiles;
    const s64 q_row = static_cast<s64>(batch) * p.q_heads + head, panel = q_row * panels + tile;
    Copies::queries(stage + S::SCORES, p.q_codes + q_row * p.q_len * HEAD_DIM, tile * TILE_TOKENS,
                    p.q_len);
    Copies::template values<DTYPE>(stage + S::VALUES, p.d_out, batch, head, tile * TILE_TOKENS,
                                   p.q_len, p.head_dim);
    Copies::as_it_is(stage + S::Q, p.q_transposed + panel * (HEAD_DIM * TILE_TOKENS),
                     S::Bytes::TRANSPOSED);
    Copies::as_it_is(stage + S::D_OUT, p.d_out_transposed + panel * (HEAD_DIM * TILE_TOKENS),
                     S::Bytes::TRANSPOSED);
    Copies::as_it_is(stage + S::QUERIES, p.queries + panel * TILE_TOKENS,
                     TILE_TOKENS * sizeof(Query));
  };
  if (p.head_dim < HEAD_DIM) {
    Copies::clear(shared, 2 * S::SIZE);
    __syncthreads();
  }
  fetch(0);
  commit_copies();

  Rows rows;
  KeyRows keys;
  rows.load_values(p.v, batch, kv_head, first_row, p.kv_len, p.head_dim,
                   shared + 2 * S::SIZE + threadIdx.x / 32 * Rows::SHARED_BYTES);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    keys.key[r] = first_row + Rows::lane_row(r);
    const int key = min(keys.key[r], p.kv_len - 1), in_block = key % BLOCK_KEYS;
    const s64 block = kv_row * p.blocks + key / BLOCK_KEYS;
    const u8* codes = p.k_codes + block * (BLOCK_KEYS * HEAD_DIM);
#pragma unroll
    for (int word = 0; word < HEAD_DIM / 16; ++word) {
      const int byte = panel_offset(row_of_key(in_block), word % 2 * 16 + 4 * Rows::t());
      rows.codes[word / 2][word % 2 * 2 + r] =
          *reinterpret_cast<const u32*>(codes + word / 2 * (BLOCK_KEYS * 32) + byte);
    }
    keys.k_scale[r] = p.k_scales[block * SCALES_PER_BLOCK + in_block / 4 % 4];
    keys.mask_row[r] = 0;
  }
  typename Rows::Sums d_k = {}, d_v = {};

  const int offset = ldmatrix_offset(threadIdx.x % 32);
  for (int turn = 0; turn < turns; ++turn) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and the one before it is no longer read
    if (turn + 1 < turns) fetch(turn + 1);
    commit_copies();
    const int first_query = (first_tile + turn % tiles) * TILE_TOKENS;
    if (p.causal && first_query + TILE_TOKENS <= first_row) continue;
    if constexpr (MASKED) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        keys.mask_row[r] = p.mask.row(batch, kv_head * group + turn / tiles,
                                      min(keys.key[r], p.kv_len - 1));
      }
    }
    const u32 stage = start + turn % 2 * S::SIZE;
    float probabilities[2][TILE_TOKENS / 4], d_s[2][TILE_TOKENS / 4];
    {
      typename Rows::Tile s;
      typename Rows::Values d_p;
      rows.multiply_codes(s, stage + S::SCORES + offset);
      rows.multiply_values(d_p, stage + S::VALUES + offset);
      const u32 queries = stage + S::QUERIES;
      if (MASKED || (p.causal && first_query < first_row + WARP_ROWS)) {
        find_p_and_ds<MASKED, true, Rows>(probabilities, d_s, s, d_p, queries, keys, p.mask,
                                          first_query, p.q_len, p.causal);
      } else {
        find_p_and_ds<false, false, Rows>(probabilities, d_s, s, d_p, queries, keys, p.mask,
                                          first_query, p.q_len, false);
      }
    }
    u32 bytes[2][TILE_TOKENS / 16];
    float weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) weight[r] = quantise_row(bytes[r], probabilities[r], PROBABILITY_MAX);
    add_product<false, HEAD_DIM>(d_v, bytes, weight, stage + S::D_OUT + offset);
#pragma unroll
    for (int r = 0; r < 2; ++r) weight[r] = quantise_row(bytes[r], d_s[r], INT8_MAX);
    add_product<true, HEAD_DIM>(d_k, bytes, weight, stage + S::Q + offset);
  }

  rotate_back<HEAD_DIM>(d_k);
  // Scales of Q have log2(e) in them, beside the softmax scale.
  constexpr float FACTOR = LN_2 / ROTATION_ROOT<HEAD_DIM>;
  store<HEAD_DIM, DTYPE>(p.d_k, d_k, FACTOR, batch, kv_head, keys, p.kv_len, p.head_dim);
  store<HEAD_DIM, DTYPE>(p.d_v, d_v, 1.0f, batch, kv_head, keys, p.kv_len, p.head_dim);
}

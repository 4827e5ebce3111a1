// Third launch of SageBwd's backward pass: dK and dV. A block of threads takes some keys of one key
// head and goes through the queries that share it, 32 at a time, head after head: nothing is added
// up in an order that could vary.
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

// P of 16 keys and a tile of queries, and P times the scales of dO.
template <bool MASKED, bool CAUSAL, typename Rows>
__device__ __forceinline__ void find_p(float (&p)[2][TILE_TOKENS / 4],
                                       float (&scaled)[2][TILE_TOKENS / 4],
                                       const typename Rows::Tile& s, u32 queries,
                                       const KeyRows& rows, const Mask& mask, int first_query,
                                       int q_len) {
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
        const float score = as_float(s[2 * pair + i / 2][2 * r + i % 2]) - MAGIC;
        const float factor = min_nan(facts[0] * rows.k_scale[r], LARGEST_FACTOR);
        float exponent = fmaf(score, factor, -facts[1]);
        if constexpr (MASKED) exponent += bias[r][i];
        const float x = CAUSAL && rows.key[r] > query + i ? 0.0f : exp2_approx(exponent);
        p[r][4 * pair + i] = x;
        scaled[r][4 * pair + i] = MASKED && x == 0.0f ? 0.0f : x * facts[3];
      }
    }
  }
}

// From P to dS times the scales of Q, in place. Where P is zero a key may be hidden, and dP be
// anything.
template <typename Rows>
__device__ __forceinline__ void find_ds(float (&p)[2][TILE_TOKENS / 4],
                                        const typename Rows::Values& d_p, u32 queries) {
#pragma unroll
  for (int i = 0; i < TILE_TOKENS / 4; ++i) {
    const int in_tile = i / 4 * 16 + 4 * Rows::t() + i % 4;
    float facts[4];  // of a Query
    load_shared_floats(facts, queries + in_tile * sizeof(Query));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float slope = p[r][i] * (d_p[i / 2][2 * r + i % 2] - facts[2]);
      p[r][i] = p[r][i] == 0.0f ? 0.0f : slope * facts[0];
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE, int WARPS, bool MASKED>
__global__ void __launch_bounds__(32 * WARPS)
sm80_sagebwd_key_gradients(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  // With 128 channels the sums of dK and dV alone take half of the registers.
  using Rows = BackwardRows<HEAD_DIM, DTYPE, (HEAD_DIM > 64)>;
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
  int head = kv_head * group, tile = first_tile;  // fetched last

  const u32 start = shared_address_of(shared);
  auto fetch = [&](u32 stage) {
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
  fetch(start);
  commit_copies();

  Rows rows;
  KeyRows keys;
  auto block_of = [&](int key) { return kv_row * p.blocks + key / BLOCK_KEYS; };
#pragma unroll
  for (int r = 0; r < 2; ++r) keys.key[r] = first_row + Rows::lane_row(r);
  rows.load(
      [&](int r, int step, int half) {
        const int key = min(keys.key[r], p.kv_len - 1);
        const u8* codes = p.k_codes + block_of(key) * (BLOCK_KEYS * HEAD_DIM);
        const int byte = panel_offset(row_of_key(key % BLOCK_KEYS), 16 * half + 4 * Rows::t());
        return *reinterpret_cast<const u32*>(codes + step * (BLOCK_KEYS * 32) + byte);
      },
      p.v, batch, kv_head, first_row, p.kv_len, p.head_dim,
      shared + 2 * S::SIZE + threadIdx.x / 32 * Rows::SHARED_BYTES);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = min(keys.key[r], p.kv_len - 1);
    keys.k_scale[r] = p.k_scales[block_of(key) * SCALES_PER_BLOCK + key / 4 % 4];
    keys.mask_row[r] = 0;
  }
  typename Rows::Sums d_k = {}, d_v = {};

  const int offset = ldmatrix_offset(threadIdx.x % 32);
  for (int turn = 0, turns = group * (panels - first_tile); turn < turns; ++turn) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and the one before it is no longer read
    const int first_query = tile * TILE_TOKENS, q_head = head;
    if (turn + 1 < turns) {
      if (++tile == panels) tile = first_tile, ++head;
      fetch(start + (turn + 1) % 2 * S::SIZE);
    }
    commit_copies();
    if (p.causal && first_query + TILE_TOKENS <= first_row) continue;
    if constexpr (MASKED) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        keys.mask_row[r] = p.mask.row(batch, q_head, min(keys.key[r], p.kv_len - 1));
      }
    }
    const u32 stage = start + turn % 2 * S::SIZE;
    // dV before dP: their numbers and those of both gradients would not fit the registers at once.
    const u32 queries = stage + S::QUERIES;
    const bool never = tile < 0;
    float p_or_ds[2][TILE_TOKENS / 4], weight[2];
    u32 bytes[2][TILE_TOKENS / 16];
    {
      typename Rows::Tile s;
      float scaled[2][TILE_TOKENS / 4];
      rows.multiply_codes(s, stage + S::SCORES + offset);
      if (p.causal && first_query < first_row + WARP_ROWS) {
        find_p<MASKED, true, Rows>(p_or_ds, scaled, s, queries, keys, p.mask, first_query,
                                   p.q_len);
      } else {
        find_p<MASKED, false, Rows>(p_or_ds, scaled, s, queries, keys, p.mask, first_query,
                                    p.q_len);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) weight[r] = quantise_row(bytes[r], scaled[r], PROBABILITY_MAX);
    }
    if (!has_weight(weight, PROBABILITY_MAX)) continue;
    if (!add_product<false, HEAD_DIM>(d_v, bytes, weight, stage + S::D_OUT + offset, never)) break;
    {
      typename Rows::Values d_p;
      rows.multiply_values(d_p, stage + S::VALUES + offset);
      find_ds<Rows>(p_or_ds, d_p, queries);
#pragma unroll
      for (int r = 0; r < 2; ++r) weight[r] = quantise_row(bytes[r], p_or_ds[r], INT8_MAX);
    }
    if (!has_weight(weight, INT8_MAX)) continue;
    if (!add_product<true, HEAD_DIM>(d_k, bytes, weight, stage + S::Q + offset, never)) break;
  }

  rotate_back<HEAD_DIM>(d_k);
  // Scales of Q have log2(e) in them, beside the softmax scale.
  constexpr float FACTOR = LN_2 / ROTATION_ROOT<HEAD_DIM>;
  store_rows<HEAD_DIM, DTYPE>(p.d_k, d_k, FACTOR, batch, kv_head, keys.key, p.kv_len, p.head_dim);
  store_rows<HEAD_DIM, DTYPE>(p.d_v, d_v, 1.0f, batch, kv_head, keys.key, p.kv_len, p.head_dim);
}

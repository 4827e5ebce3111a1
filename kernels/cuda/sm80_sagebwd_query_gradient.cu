// Second launch of SageBwd's backward pass: dQ. A block of threads takes some queries of one head
// and goes through the keys, 32 at a time; nothing is added up in an order that could vary.
#include "sagebwd_warp.cuh"

struct Params {
  const u8* q_codes;       // [B, Hq, Nq, HEAD_DIM]
  const Query* queries;    // [B, Hq, panels * TILE_TOKENS]
  const u8* k_codes;       // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  const u8* k_transposed;  // [B, Hk, 2 * blocks, HEAD_DIM * TILE_TOKENS]
  const float* k_scales;   // [B, Hk, blocks, SCALES_PER_BLOCK]
  Tensor d_out, v;         // [B, Hq, Nq, D], [B, Hk, Nk, D]
  Mask mask;
  Output d_q;   // [B, Hq, Nq, D]
  float scale;  // of the softmax
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K per (batch, key head)
  int causal;
};

// Offsets of a tile's parts in shared memory, in bytes.
template <int HEAD_DIM>
struct Stage {
  using Bytes = TileBytes<HEAD_DIM>;
  static constexpr int SCORES = 0, VALUES = Bytes::SCORES, KEYS = VALUES + Bytes::VALUES;
  static constexpr int SIZE = KEYS + Bytes::TRANSPOSED;
};

// What the two rows of a lane are.
struct QueryRows {
  float q_scale[2], lse[2], delta[2];
  int last_key[2];   // that the row may see, the mask aside
  s64 mask_row[2];
};

// dS of 16 queries and a tile of keys, times the scales of K, as bytes; and their scales. HIDDEN:
// some key may be, and then dP be anything.
template <bool MASKED, bool HIDDEN, typename Rows>
__device__ __forceinline__ void find_ds(u32 (&bytes)[2][TILE_TOKENS / 16], float (&weight)[2],
                                        const typename Rows::Tile& s,
                                        const typename Rows::Values& d_p, const QueryRows& rows,
                                        float k_scale, const Mask& mask, int first_key,
                                        int kv_len) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = min_nan(rows.q_scale[r] * k_scale, LARGEST_FACTOR);
    float d_s[TILE_TOKENS / 4];
#pragma unroll
    for (int pair = 0; pair < Rows::PAIRS; ++pair) {
      const int key = first_key + 16 * pair + 4 * Rows::t();
      float bias[4] = {};
      if constexpr (MASKED) read_mask(bias, mask, rows.mask_row[r], key, kv_len);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * pair + i / 2, x = 2 * r + i % 2;
        float exponent = fmaf(as_float(s[n][x]) - MAGIC, factor, -rows.lse[r]);
        if constexpr (MASKED) exponent += bias[i];
        const float p = exp2_approx(exponent);
        const float slope = p * (d_p[n][x] - rows.delta[r]) * k_scale;
        const bool hidden = HIDDEN && (key + i > rows.last_key[r] || p == 0.0f);
        d_s[4 * pair + i] = hidden ? 0.0f : slope;
      }
    }
    weight[r] = quantise_row(bytes[r], d_s, INT8_MAX);
  }
}

template <int HEAD_DIM, Dtype DTYPE, int WARPS, bool MASKED>
__global__ void __launch_bounds__(32 * WARPS)
sm80_sagebwd_query_gradient(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  using Rows = BackwardRows<HEAD_DIM, DTYPE>;
  using S = Stage<HEAD_DIM>;
  using Copies = TileCopies<HEAD_DIM, 32 * WARPS>;
  constexpr int BLOCK_ROWS = WARPS * WARP_ROWS;
  const int row_blocks = (p.q_len + BLOCK_ROWS - 1) / BLOCK_ROWS;
  int row_block = blockIdx.x % row_blocks;
  // Longest rows first, so that a causal call's last blocks are its short ones.
  if (p.causal) row_block = row_blocks - 1 - row_block;
  const int head = blockIdx.x / row_blocks % p.q_heads, batch = blockIdx.x / row_blocks / p.q_heads;
  const int kv_head = head / (p.q_heads / p.kv_heads);
  const int first_row = row_block * BLOCK_ROWS + threadIdx.x / 32 * WARP_ROWS;
  const int keys = p.causal ? min(p.kv_len, (row_block + 1) * BLOCK_ROWS) : p.kv_len;
  const int tiles = (keys + TILE_TOKENS - 1) / TILE_TOKENS;
  const s64 kv_row = static_cast<s64>(batch) * p.kv_heads + kv_head;
  const s64 q_row = static_cast<s64>(batch) * p.q_heads + head;

  const u32 start = shared_address_of(shared);
  auto fetch = [&](int tile) {
    const u32 stage = start + tile % 2 * S::SIZE;
    const s64 block = kv_row * p.blocks + tile / 2;
    Copies::keys(stage + S::SCORES, p.k_codes + block * (BLOCK_KEYS * HEAD_DIM), tile % 2);
    Copies::template values<DTYPE>(stage + S::VALUES, p.v, batch, kv_head, tile * TILE_TOKENS,
                                   p.kv_len, p.head_dim);
    Copies::as_it_is(stage + S::KEYS,
                     p.k_transposed + (2 * block + tile % 2) * (HEAD_DIM * TILE_TOKENS),
                     S::Bytes::TRANSPOSED);
  };
  if (p.head_dim < HEAD_DIM) {
    Copies::clear(shared, 2 * S::SIZE);
    __syncthreads();
  }
  fetch(0);
  commit_copies();

  Rows rows;
  QueryRows queries;
  auto row_of = [&](int r) { return min(first_row + Rows::lane_row(r), p.q_len - 1); };
  rows.load(
      [&](int r, int step, int half) {
        const u8* codes = p.q_codes + (q_row * p.q_len + row_of(r)) * HEAD_DIM;
        return reinterpret_cast<const u32*>(codes)[8 * step + 4 * half + Rows::t()];
      },
      p.d_out, batch, head, first_row, p.q_len, p.head_dim, nullptr);
  const int panels = (p.q_len + TILE_TOKENS - 1) / TILE_TOKENS;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r);
    const Query query = p.queries[q_row * panels * TILE_TOKENS + row];
    queries.q_scale[r] = query.q_scale, queries.lse[r] = query.lse, queries.delta[r] = query.delta;
    queries.last_key[r] = p.causal ? min(row, p.kv_len - 1) : p.kv_len - 1;
    queries.mask_row[r] = MASKED ? p.mask.row(batch, head, row) : 0;
  }
  typename Rows::Sums d_q = {};

  const int offset = ldmatrix_offset(threadIdx.x % 32);
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and the one before it is no longer read
    if (tile + 1 < tiles) fetch(tile + 1);
    commit_copies();
    const int first_key = tile * TILE_TOKENS;
    if (p.causal && first_key >= first_row + WARP_ROWS) continue;
    const u32 stage = start + tile % 2 * S::SIZE + offset;
    typename Rows::Tile s;
    typename Rows::Values d_p;
    rows.multiply_codes(s, stage + S::SCORES);
    rows.multiply_values(d_p, stage + S::VALUES);
    const float k_scale =
        p.k_scales[(kv_row * p.blocks + tile / 2) * SCALES_PER_BLOCK + Rows::t()];
    u32 bytes[2][TILE_TOKENS / 16];
    float weight[2];
    const int whole = p.causal ? min(p.kv_len, first_row + 1) : p.kv_len;
    if (MASKED || first_key + TILE_TOKENS > whole) {
      find_ds<MASKED, true, Rows>(bytes, weight, s, d_p, queries, k_scale, p.mask, first_key,
                                  p.kv_len);
    } else {
      find_ds<false, false, Rows>(bytes, weight, s, d_p, queries, k_scale, p.mask, first_key,
                                  p.kv_len);
    }
    add_product<true, HEAD_DIM>(d_q, bytes, weight, stage + S::KEYS);
  }

  rotate_back<HEAD_DIM>(d_q);
  const int tokens[2] = {first_row + Rows::lane_row(0), first_row + Rows::lane_row(1)};
  store_rows<HEAD_DIM, DTYPE>(p.d_q, d_q, p.scale * (1.0f / ROTATION_ROOT<HEAD_DIM>), batch, head,
                              tokens, p.q_len, p.head_dim);
}

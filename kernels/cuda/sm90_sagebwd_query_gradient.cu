// Second launch of SageBwd's backward pass on wgmma: dQ. A block of threads takes some queries of one
// head, 64 for each consumer, and goes through the keys, 64 at a time; nothing is added up in an order
// that could vary.
#include "output.cuh"
#include "sagebwd_group.cuh"

struct Params {
  const u8* query_tiles;  // [B, Hq, tiles, QueryTile::BYTES]
  const u8* key_tiles;    // [B, Hk, blocks, KeyTile::BYTES]
  Output d_q;             // [B, Hq, Nq, D]
  float scale;            // of the softmax
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K per (batch, key head)
  int causal;
};

// What the two rows of a lane are.
struct QueryRows {
  float q_scale[2], lse[2], delta[2];
  int last_key[2];  // that the row may see
};

// P of a lane's queries and keys. HIDDEN: some key may be.
template <bool HIDDEN>
__device__ __forceinline__ void find_p(RowTokens& p, const Product& s, const QueryRows& rows,
                                       float k_scale, int first_key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = rows.q_scale[r] * k_scale;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + 16 * pair + 4 * lane_of_quad() + i;
        const float score = static_cast<float>(static_cast<s32>(s[place_of(r, pair, i)]));
        const float x = exp2_approx(fmaf(score, factor, -rows.lse[r]));
        p[r][4 * pair + i] = HIDDEN && key > rows.last_key[r] ? 0.0f : x;
      }
    }
  }
}

// From P to dS, in place. Where a key is hidden, dP may be anything.
template <bool HIDDEN>
__device__ __forceinline__ void find_ds(RowTokens& p, const Product& d_p, const QueryRows& rows,
                                        int first_key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + 16 * pair + 4 * lane_of_quad() + i;
        float& x = p[r][4 * pair + i];
        const float slope = x * (as_float(d_p[place_of(r, pair, i)]) - rows.delta[r]);
        x = HIDDEN && key > rows.last_key[r] ? 0.0f : slope;
      }
    }
  }
}

template <int HEAD_DIM, Dtype DTYPE, int CONSUMERS, int STAGES>
__global__ void __launch_bounds__((1 + CONSUMERS) * GROUP, 1)
sm90_sagebwd_query_gradient(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  using Tile = KeyTile<HEAD_DIM>;
  constexpr int ROWS = CONSUMERS * TILE_TOKENS, OWN = CONSUMERS * OWN_BYTES<HEAD_DIM>;
  const u32 start = shared_address_of(shared);
  const TileRing<Tile::COPIED, STAGES> ring{start + OWN};
  const Barrier own_tiles{start + OWN + ring.SIZE};

  const int row_blocks = (p.q_len + ROWS - 1) / ROWS;
  int row_block = blockIdx.x % row_blocks;
  // Longest rows first, so that a causal call's last blocks are its short ones.
  if (p.causal) row_block = row_blocks - 1 - row_block;
  const int head = blockIdx.x / row_blocks % p.q_heads, batch = blockIdx.x / row_blocks / p.q_heads;
  const int kv_head = head / (p.q_heads / p.kv_heads);
  const int keys = p.causal ? min(p.kv_len, (row_block + 1) * ROWS) : p.kv_len;
  const int turns = (keys + TILE_TOKENS - 1) / TILE_TOKENS;
  const int query_tiles = (p.q_len + TILE_TOKENS - 1) / TILE_TOKENS;
  const s64 q_row = static_cast<s64>(batch) * p.q_heads + head;
  // A consumer past the last query works on the last tile, and stores nothing.
  auto query_tile = [&](int index) {
    return p.query_tiles + (q_row * query_tiles + min(row_block * CONSUMERS + index,
                                                      query_tiles - 1)) *
                               QueryTile<HEAD_DIM>::BYTES;
  };

  if (threadIdx.x == 0) {
    ring.start(CONSUMERS * GROUP / 32);
    own_tiles.init(1);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < GROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      own_tiles.expect(OWN);
      for (int i = 0; i < CONSUMERS; ++i) {
        own_tiles.copy(start + i * OWN_BYTES<HEAD_DIM>, query_tile(i), OWN_BYTES<HEAD_DIM>);
      }
      const u8* tiles =
          p.key_tiles + (static_cast<s64>(batch) * p.kv_heads + kv_head) * p.blocks * Tile::BYTES;
      ring.fill(turns, [&](int turn) { return tiles + static_cast<s64>(turn) * Tile::BYTES; });
    }
    return;
  }

  take_registers<CONSUMER_REGISTERS<CONSUMERS>>();
  const int first_row = row_block * ROWS + consumer() * TILE_TOKENS;
  const u8* query_rows = query_tile(consumer()) + QueryTile<HEAD_DIM>::ROWS;
  const u32 own = start + consumer() * OWN_BYTES<HEAD_DIM>;
  own_tiles.wait(0);
  QueryRows queries;
  const int tokens[2] = {first_row + token_of_row(0), first_row + token_of_row(1)};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const QueryRow row = reinterpret_cast<const QueryRow*>(query_rows)[token_of_row(r)];
    queries.q_scale[r] = row.q_scale, queries.lse[r] = row.lse, queries.delta[r] = row.delta;
    queries.last_key[r] = p.causal ? min(tokens[r], p.kv_len - 1) : p.kv_len - 1;
  }
  const int whole = p.causal ? min(p.kv_len, first_row + 1) : p.kv_len;
  float d_q[HEAD_DIM / 8][4] = {};

  Turn<STAGES> turn;
  Product s, d_p;  // and dS K
  ring.full(0).wait(0);
  multiply_codes<HEAD_DIM>(s, own, ring.tile(0));
  multiply_values<HEAD_DIM, DTYPE>(d_p, own, ring.tile(0));
  wgmma_wait<1>();
  pin(s);
  for (int i = 0; i < turns; ++i) {
    const u32 tile = ring.tile(turn.stage);
    const int first_key = i * TILE_TOKENS;
    const float k_scale = load_shared_float(tile + Tile::SCALES + lane_of_quad() * 4);
    const bool hides = first_key + TILE_TOKENS > whole;
    RowTokens x;
    RowBytes bytes;
    float weight[2];
    if (hides) {
      find_p<true>(x, s, queries, k_scale, first_key);
    } else {
      find_p<false>(x, s, queries, k_scale, first_key);
    }
    wgmma_wait<0>();
    pin(d_p);
    if (hides) {
      find_ds<true>(x, d_p, queries, first_key);
    } else {
      find_ds<false>(x, d_p, queries, first_key);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) weight[r] = quantise_row(bytes[r], x[r], INT8_MAX, k_scale);

    // After the last tile its scores are computed once more, instead of asking; nobody reads them.
    Turn<STAGES> next = turn;
    if (i + 1 < turns) next.advance();
    add_and_go_on<HEAD_DIM, DTYPE>(d_q, s, d_p, bytes, weight, own, ring, turn, next,
                                   [](u32) {});
    turn = next;
  }
  wgmma_wait<0>();
  pin(d_p);

  rotate_back<HEAD_DIM>(d_q);
  store_rows<HEAD_DIM, DTYPE>(p.d_q, d_q, p.scale * (1.0f / ROTATION_ROOT<HEAD_DIM>), batch, head,
                              tokens, p.q_len, p.head_dim);
}

// Second launch of SageBwd's backward pass on wgmma: dK and dV of a chunk of keys, and dS, of which
// the next launch makes dQ. A block of threads takes some keys of one key head, 64 for each
// consumer, and goes through the queries that share it, 64 at a time, head after head: nothing is
// added up in an order that could vary.
//
// P^T dO is in 16 bits, other than in the kernel of all GPUs. In 8 bits it would take half as long,
// but finding scales, rounding and bringing integers into FP32 costs 300 instructions for each warp
// and tile of 128 channels, when instructions are what binds (docs/kernel-notes-sagebwd.md).
#include "output.cuh"
#include "sagebwd_group_products.cuh"

struct Params {
  const u8* query_tiles;  // [B, Hq, tiles, QueryTile::BYTES]
  const u8* key_tiles;    // [B, Hk, blocks, KeyTile::BYTES]
  u8* ds;                 // [q heads of the chunk, query tiles, chunk.tiles, DsTile::BYTES]
  Output d_k, d_v;        // [B, Hk, Nk, D]
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K per (batch, key head), an even number
  int causal;
  Chunk chunk;  // of keys; tiles from an even one on, and an even number
};

// Two facts of four neighbouring queries, of AHEAD pairs at a time. A load from shared memory seems to queue
// behind what products read from there, so that it is begun well before its use: a fifth of the
// samples of a profile were waits for these.
template <QueryFact FIRST, QueryFact SECOND, int AHEAD>
struct Facts {
  u32 shared;  // of the tile, plus this lane's offset
  float first[AHEAD][4], second[AHEAD][4];

  // facts: address of the tile's.
  __device__ __forceinline__ void start(u32 facts) {
    shared = facts + lane_of_quad() * 16;
#pragma unroll
    for (int pair = 0; pair < AHEAD; ++pair) load(pair);
  }

  __device__ __forceinline__ void load(int pair) {
    load_shared_floats(first[pair % AHEAD], shared + FIRST * TILE_TOKENS * 4 + pair * 64);
    load_shared_floats(second[pair % AHEAD], shared + SECOND * TILE_TOKENS * 4 + pair * 64);
  }

  // After the use of a pair's.
  __device__ __forceinline__ void go_on(int pair) {
    if (pair + AHEAD < PAIRS) load(pair + AHEAD);
  }
};

template <int HEAD_DIM>
constexpr int FACTS_AHEAD = HEAD_DIM == 64 ? PAIRS : 2;  // as many as registers are left for

// Which queries see a key. No query sees one that is not there; others are hidden in causal calls.
struct Visible {
  bool causal;
  int kv_len, first_query, first_key;  // first ones of the tiles

  // Whether any key is hidden from any query of the two tiles.
  __device__ __forceinline__ bool not_all() const {
    return first_key + TILE_TOKENS > kv_len || (causal && first_query < first_key + TILE_TOKENS);
  }

  // This lane's key `r`, or a number that is greater than that of any query that sees it.
  __device__ __forceinline__ int key(int r) const {
    const int token = first_key + token_of_row(r);
    return token < kv_len ? token : 0x7fffffff;
  }

  // The last key that query `in_tile` sees, if it is there.
  __device__ __forceinline__ int last_key(int in_tile) const {
    return causal ? first_query + in_tile : 0x7ffffffe;
  }
};

// P of a lane's keys and queries, times the scales of dO. HIDES: some key is hidden.
template <bool HIDES, int AHEAD>
__device__ __forceinline__ void find_p(RowTokens& p, const Product& s,
                                       Facts<Q_SCALE, SHIFT, AHEAD>& facts, float k_scale,
                                       const Visible& visible) {
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int in_tile = 16 * pair + 4 * lane_of_quad();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = facts.first[pair % AHEAD][i] * k_scale;
      const float shift = facts.second[pair % AHEAD][i];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float score = static_cast<float>(static_cast<s32>(s[place_of(r, pair, i)]));
        const float x = exp2_approx(fmaf(score, factor, shift));
        const bool hidden = HIDES && visible.key(r) > visible.last_key(in_tile + i);
        p[r][4 * pair + i] = hidden ? 0.0f : x;
      }
    }
    facts.go_on(pair);
  }
}

// From there to dS times SLOPE's scales, in place. Where a key is hidden, dP may be anything.
template <bool HIDES, int AHEAD>
__device__ __forceinline__ void find_ds(RowTokens& p, const Product& d_p,
                                        Facts<SLOPE, OFFSET, AHEAD>& facts,
                                        const Visible& visible) {
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int in_tile = 16 * pair + 4 * lane_of_quad();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float slope = facts.first[pair % AHEAD][i];
      const float offset = facts.second[pair % AHEAD][i];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& x = p[r][4 * pair + i];
        const bool hidden = HIDES && visible.key(r) > visible.last_key(in_tile + i);
        x = hidden ? 0.0f : x * fmaf(as_float(d_p[place_of(r, pair, i)]), slope, offset);
      }
    }
    facts.go_on(pair);
  }
}

template <int HEAD_DIM, Dtype DTYPE, int CONSUMERS, int STAGES>
__global__ void __launch_bounds__((1 + CONSUMERS) * GROUP, 1)
sm90_sagebwd_key_gradients(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  using Tile = QueryTile<HEAD_DIM>;
  constexpr int ROWS = CONSUMERS * TILE_TOKENS, OWN = CONSUMERS * OWN_BYTES<HEAD_DIM>;
  const u32 start = shared_address_of(shared);
  const TileRing<Tile::BYTES, STAGES> ring{start + OWN};
  const Barrier own_tiles{start + OWN + ring.SIZE};

  const int row_blocks = p.chunk.tiles / CONSUMERS;
  const int row_block = p.chunk.first_tile / CONSUMERS + blockIdx.x % row_blocks;
  const int kv_row = p.chunk.first_head + blockIdx.x / row_blocks;
  const int kv_head = kv_row % p.kv_heads, batch = kv_row / p.kv_heads;
  const int group = p.q_heads / p.kv_heads, tiles = (p.q_len + TILE_TOKENS - 1) / TILE_TOKENS;
  // Queries before the first key of the block see none of it in a causal call.
  const int first_tile = p.causal ? row_block * CONSUMERS : 0;
  const int per_head = tiles - first_tile, turns = group * per_head;
  auto key_tile = [&](int index) {
    return p.key_tiles + (static_cast<s64>(kv_row) * p.blocks + row_block * CONSUMERS + index) *
                             KeyTile<HEAD_DIM>::BYTES;
  };

  if (threadIdx.x == 0) {
    ring.start(CONSUMERS * GROUP);
    own_tiles.init(1);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < GROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      own_tiles.expect(OWN);
      for (int i = 0; i < CONSUMERS; ++i) {
        own_tiles.copy(start + i * OWN_BYTES<HEAD_DIM>, key_tile(i), OWN_BYTES<HEAD_DIM>);
      }
      const u8* query_tiles =
          p.query_tiles + static_cast<s64>(kv_row) * group * tiles * Tile::BYTES;
      ring.fill(turns, [&](int turn, Barrier full, u32 target) {
        const int head = turn / per_head, tile = first_tile + turn % per_head;
        full.expect(Tile::BYTES);
        full.copy(target, query_tiles + (static_cast<s64>(head) * tiles + tile) * Tile::BYTES,
                  Tile::BYTES);
      });
    }
    return;
  }

  take_registers<CONSUMER_REGISTERS<CONSUMERS>>();
  const int first_key = row_block * ROWS + consumer() * TILE_TOKENS;
  const u32 own = start + consumer() * OWN_BYTES<HEAD_DIM>;
  own_tiles.wait(0);
  // Both of a lane's keys share a scale.
  const float k_scale = reinterpret_cast<const float*>(
      key_tile(consumer()) + KeyTile<HEAD_DIM>::SCALES)[token_of_row(0) / 4 % 4];
  float d_k[HEAD_DIM / 8][4] = {}, d_v[HEAD_DIM / 2] = {};

  Turn<STAGES> turn;
  Product s, d_p;  // and dS^T Q
  ring.full(0).wait(0);
  multiply_codes<HEAD_DIM>(s, own, ring.tile(0));
  multiply_values<HEAD_DIM, DTYPE>(d_p, own, ring.tile(0));
  Facts<Q_SCALE, SHIFT, FACTS_AHEAD<HEAD_DIM>> of_scores;
  of_scores.start(ring.tile(0) + Tile::FACTS);
  wgmma_wait<1>();
  pin(s);
  int first_query = first_tile * TILE_TOKENS;
  int ds_tile = (blockIdx.x / row_blocks * group * tiles + first_tile) * p.chunk.tiles +
                blockIdx.x % row_blocks * CONSUMERS + consumer();
  for (int i = 0; i < turns; ++i) {
    const u32 tile = ring.tile(turn.stage);
    const Visible visible{p.causal != 0, p.kv_len, first_query, first_key};
    const bool hides = visible.not_all();
    RowTokens x;
    if (hides) {
      find_p<true>(x, s, of_scores, k_scale, visible);
    } else {
      find_p<false>(x, s, of_scores, k_scale, visible);
    }
    Facts<SLOPE, OFFSET, FACTS_AHEAD<HEAD_DIM>> of_slopes;
    of_slopes.start(tile + Tile::FACTS);
    u32 probabilities[PAIRS][4];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float* two = x[word % 2] + 4 * pair + word / 2 * 2;
        probabilities[pair][word] =
            DTYPE == F16 ? pack_f16x2(two[0], two[1]) : pack_bf16x2(two[0], two[1]);
      }
    }
    wgmma_wait<0>();
    pin(d_p);
    wgmma_begin();
    const WgmmaOperand d_out =
        WgmmaOperand::rows_of_128_bytes(tile, VALUE_PANEL) + Tile::VALUES;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      wgmma_16bit<DTYPE>(d_v, probabilities[pair], d_out + pair * (16 * 128));
    }
    wgmma_commit();
    if (hides) {
      find_ds<true>(x, d_p, of_slopes, visible);
    } else {
      find_ds<false>(x, d_p, of_slopes, visible);
    }
    RowBytes bytes;
    float weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) weight[r] = quantise_row(bytes[r], x[r], INT8_MAX);
    DsWords words;
    pair_keys(words, bytes);
    pin(words);
    auto store = [&] {
      const float weights[2] = {weight[0] * k_scale, weight[1] * k_scale};
      store_ds(p.ds + static_cast<s64>(ds_tile) * DsTile::BYTES, words, weights);
    };

    // After the last tile its scores are computed once more, instead of asking; nobody reads them.
    Turn<STAGES> next = turn;
    if (i + 1 < turns) next.advance();
    if ((first_query += TILE_TOKENS) >= tiles * TILE_TOKENS) first_query = first_tile * TILE_TOKENS;
    auto prefetch = [&](u32 next_tile) { of_scores.start(next_tile + Tile::FACTS); };
    add_and_go_on<HEAD_DIM, DTYPE>(d_k, s, d_p, bytes, weight, own, ring, turn, next, store,
                                   prefetch);
    pin(d_v);
    // At the next head's first tile, past those that see none of these keys.
    ds_tile += p.chunk.tiles * (first_query == first_tile * TILE_TOKENS ? 1 + first_tile : 1);
    turn = next;
  }
  wgmma_wait<0>();
  pin(d_p);

  rotate_back<HEAD_DIM>(d_k);
  const int keys[2] = {first_key + token_of_row(0), first_key + token_of_row(1)};
  // Scales of Q have log2(e) in them, beside the softmax scale.
  constexpr float FACTOR = LN_2 / ROTATION_ROOT<HEAD_DIM>;
  store_rows<HEAD_DIM, DTYPE>(p.d_k, d_k, FACTOR, batch, kv_head, keys, p.kv_len, p.head_dim);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) d_k[i / 4][i % 4] = d_v[i];
  store_rows<HEAD_DIM, DTYPE>(p.d_v, d_k, P_UNIT<DTYPE>, batch, kv_head, keys, p.kv_len,
                              p.head_dim);
}

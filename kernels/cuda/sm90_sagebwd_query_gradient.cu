// Third launch of SageBwd's backward pass on wgmma: dQ of dS, which the second one left in memory for
// a chunk of keys. A block of threads takes some queries of one head, 64 for each consumer, and goes
// through the keys, 64 at a time; nothing is added up in an order that could vary.
//
// The product is in BF16, in which codes of K are exact and those of dS times their weights nearly
// so: it is then added up in FP32 by the tensor cores alone. In 8 bits the weights of keys could not
// be taken out of sums over keys; and dS takes as long to come from memory.
#include "output.cuh"
#include "sagebwd_group_ds.cuh"

struct Params {
  const u8* query_tiles;  // [B, Hq, tiles, QueryTile::BYTES]
  const u8* key_tiles;    // [B, Hk, blocks, KeyTile::BYTES]
  const u8* ds;           // [q heads of the chunk, query tiles, chunk.tiles, DsTile::BYTES]
  float* sums;            // [q heads of the chunk, query tiles, HEAD_DIM / 2, GROUP] between chunks
  Output d_q;             // [B, Hq, Nq, D]
  float scale;            // of the softmax
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K per (batch, key head)
  int causal;
  Chunk chunk;  // of keys
};

template <int HEAD_DIM, Dtype DTYPE, int CONSUMERS, int STAGES>
__global__ void __launch_bounds__((1 + CONSUMERS) * GROUP, 1)
sm90_sagebwd_query_gradient(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  using Keys = KeyTile<HEAD_DIM>;
  constexpr int NUMBERS = Keys::NUMBER_BYTES;
  const TileRing<NUMBERS + CONSUMERS * DsTile::BYTES, STAGES> ring{shared_address_of(shared)};

  const int query_tiles = (p.q_len + TILE_TOKENS - 1) / TILE_TOKENS;
  const int key_tiles = (p.kv_len + TILE_TOKENS - 1) / TILE_TOKENS;
  const int row_blocks = (query_tiles + CONSUMERS - 1) / CONSUMERS;
  int row_block = blockIdx.x % row_blocks;
  // Longest rows first, so that a causal call's last blocks are its short ones.
  if (p.causal) row_block = row_blocks - 1 - row_block;
  const int group = p.q_heads / p.kv_heads, chunk_head = blockIdx.x / row_blocks;
  const int row = p.chunk.first_head * group + chunk_head;  // of all heads of all batches
  const int head = row % p.q_heads, batch = row / p.q_heads;
  // Tiles of the chunk that a query tile sees any key of; dS of others was never written.
  auto tiles_of = [&](int query_tile) {
    const int tiles = min(p.chunk.tiles, key_tiles - p.chunk.first_tile);
    if (query_tile >= query_tiles) return 0;
    return p.causal ? max(min(tiles, query_tile + 1 - p.chunk.first_tile), 0) : tiles;
  };
  const int turns = tiles_of(min((row_block + 1) * CONSUMERS, query_tiles) - 1);

  if (threadIdx.x == 0) {
    ring.start(CONSUMERS * GROUP);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < GROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      const u8* keys = p.key_tiles + (static_cast<s64>(row / group) * p.blocks +
                                      p.chunk.first_tile) * Keys::BYTES + Keys::NUMBERS;
      const s64 ds_row = static_cast<s64>(p.chunk.tiles) * DsTile::BYTES;
      const u8* ds = p.ds + (static_cast<s64>(chunk_head) * query_tiles + row_block * CONSUMERS) *
                                ds_row;
      ring.fill(turns, [&](int turn, Barrier full, u32 target) {
        int readers = 0;
        for (int i = 0; i < CONSUMERS; ++i) {
          readers += turn < tiles_of(row_block * CONSUMERS + i);
        }
        full.expect(NUMBERS + readers * DsTile::BYTES);
        full.copy(target, keys + static_cast<s64>(turn) * Keys::BYTES, NUMBERS);
        for (int i = 0; i < CONSUMERS; ++i) {
          if (turn >= tiles_of(row_block * CONSUMERS + i)) continue;
          full.copy(target + NUMBERS + i * DsTile::BYTES,
                    ds + i * ds_row + static_cast<s64>(turn) * DsTile::BYTES, DsTile::BYTES);
        }
      });
    }
    return;
  }

  take_registers<CONSUMER_REGISTERS<CONSUMERS>>();
  const int query_tile = row_block * CONSUMERS + consumer();
  const bool there = query_tile < query_tiles;
  float* sums = p.sums + (static_cast<s64>(chunk_head) * query_tiles + query_tile) *
                             (TILE_TOKENS * HEAD_DIM) + threadIdx.x % GROUP;
  float d_q[HEAD_DIM / 2] = {};
  if (there && p.chunk.first_tile > 0) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) d_q[i] = sums[i * GROUP];
  }

  const int own_turns = tiles_of(query_tile);
  Turn<STAGES> turn;
  for (int i = 0; i < turns; ++i) {
    const u32 stage = ring.tile(turn.stage);
    ring.full(turn.stage).wait(turn.parity);
    if (i < own_turns) {
      u32 ds[TILE_TOKENS / 16][4];
#pragma unroll
      for (int chunk = 0; chunk < TILE_TOKENS / 16; ++chunk) {
        load_ds(ds[chunk], stage + NUMBERS + consumer() * DsTile::BYTES, chunk);
      }
      const WgmmaOperand numbers = WgmmaOperand::rows_of_128_bytes(stage, VALUE_PANEL);
      wgmma_begin();
#pragma unroll
      for (int chunk = 0; chunk < TILE_TOKENS / 16; ++chunk) {
        wgmma_16bit<BF16>(d_q, ds[chunk], numbers + chunk * (16 * 128));
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(d_q);
    }
    ring.empty(turn.stage).arrive();
    turn.advance();
  }
  if (!there) return;
  if (p.chunk.first_tile + p.chunk.tiles < key_tiles) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i * GROUP] = d_q[i];
    return;
  }

  const float* slopes = reinterpret_cast<const float*>(
      p.query_tiles + (static_cast<s64>(row) * query_tiles + query_tile) *
                          QueryTile<HEAD_DIM>::BYTES + QueryTile<HEAD_DIM>::FACTS) +
      SLOPE * TILE_TOKENS;
  float unit[2];  // what dS was not multiplied by; none where there is no dS
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float slope = slopes[token_of_row(r)];
    unit[r] = slope == 0.0f ? 0.0f : P_UNIT<DTYPE> / slope;
  }
  float x[HEAD_DIM / 8][4];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) x[i / 4][i % 4] = d_q[i] * unit[i / 2 % 2];
  rotate_back<HEAD_DIM>(x);
  const int first = query_tile * TILE_TOKENS;
  const int tokens[2] = {first + token_of_row(0), first + token_of_row(1)};
  store_rows<HEAD_DIM, DTYPE>(p.d_q, x, p.scale * (1.0f / ROTATION_ROOT<HEAD_DIM>), batch, head,
                              tokens, p.q_len, p.head_dim);
}

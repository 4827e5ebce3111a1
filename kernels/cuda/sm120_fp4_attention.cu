// Last launch of FP4 attention: P V in NVFP4, Q K^T in NVFP4 or INT8, the softmax between them in
// FP32. fp4_warp.cuh says how; here is how a block's warps share K and V, and how a row ends.
#include "fp4_warp.cuh"
#include "int8_scores.cuh"
#include "output.cuh"
#include "pipeline.cuh"

struct Params {
  const u8* q_codes;       // [B, Hq, Nq], see fp4_layout.cuh
  const u8* q_scales;      // likewise; FP32 of Q in INT8, times softmax scale and log2(e)
  const float2* q_factors;  // [B, Hq, q_blocks]: scales times softmax scale and log2(e), and limits
  const u8* kv;            // [B, Hk, kv_blocks] of KvBlock or Int8KvBlock
  const float* kv_scales;  // [B, Hk, 2]: of all K (in INT8 the largest), of all V
  const float* v_mean;     // [B, Hk, HEAD_DIM]
  const u8* delta;         // [heads and row blocks of this launch][Q_BLOCKS][kv_blocks] of DELTA_BYTES
  Mask mask;
  Output out;
  float* lse;  // [B, Hq, Nq] of the scores of smoothed K, natural logarithm; may be null
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int q_blocks, kv_blocks;  // per head; both a multiple of what a tile takes
  int first_head, first_row_block, row_blocks;  // of this launch; heads of all batches
  int causal;
  int out_dtype;
};

constexpr int Q_BLOCKS = 2;  // of query rows per block of threads, each smoothed by its own mean

// Tiles of K, V and smoothed-away scores in a ring of stages. One thread begins their copies; warps
// wait for a tile and say when they have left it.
template <typename Scores, int WARPS, int STAGES, int TILE_BLOCKS>
struct Ring {
  using Block = typename Scores::Block;
  static constexpr bool SMOOTH_Q = Scores::SMOOTH_Q;
  static constexpr int AHEAD = STAGES / 2;  // tiles under way, so that a slow warp holds up no copy
  static constexpr int KV_BYTES = TILE_BLOCKS * Block::BYTES;
  static constexpr int DELTA_TILE = TILE_BLOCKS * DELTA_BYTES;
  static constexpr int STAGE = KV_BYTES + (SMOOTH_Q ? Q_BLOCKS * DELTA_TILE : 0);

  u32 shared;
  const u8 *kv, *delta;
  int kv_blocks;
  int stage = 0, parity = 0;               // of the tile to read next
  int next_stage = 0, next_parity = 1;     // of the tile to fetch next

  __device__ __forceinline__ Barrier full(int stage) const { return {shared + STAGES * STAGE + 8 * stage}; }
  __device__ __forceinline__ Barrier empty(int stage) const {
    return {shared + STAGES * (STAGE + 8) + 8 * stage};
  }

  // By all threads.
  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < STAGES; ++i) full(i).init(1), empty(i).init(32 * WARPS);
      publish_barriers();
    }
    __syncthreads();
  }

  // By one thread, for one tile after the other.
  __device__ __forceinline__ void fetch(int tile) {
    const Barrier barrier = full(next_stage);
    const u32 target = shared + next_stage * STAGE;
    barrier.expect(STAGE);
    barrier.copy(target, kv + static_cast<s64>(tile) * KV_BYTES, KV_BYTES);
    if constexpr (SMOOTH_Q) {
#pragma unroll
      for (int i = 0; i < Q_BLOCKS; ++i) {
        barrier.copy(target + KV_BYTES + i * DELTA_TILE,
                     delta + (static_cast<s64>(i) * kv_blocks + tile * TILE_BLOCKS) * DELTA_BYTES,
                     DELTA_TILE);
      }
    }
    barrier.settle();
  }

  __device__ __forceinline__ void wait_until_empty() const { empty(next_stage).wait(next_parity); }
  __device__ __forceinline__ void next_fetch() { advance(next_stage, next_parity); }

  // The shared address of the next tile, once it is there.
  __device__ __forceinline__ u32 wait() const {
    full(stage).wait(parity);
    return shared + stage * STAGE;
  }

  __device__ __forceinline__ void leave() {
    __syncwarp();  // orders nothing, but without it ptxas spills registers of int8_fp4
    empty(stage).arrive();
    advance(stage, parity);
  }

 private:
  static __device__ __forceinline__ void advance(int& stage, int& parity) {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// O = out / sum in V's units, with V's mean back; a row that saw no key gives zeros.
template <Dtype DTYPE, typename W>
__device__ __forceinline__ void store(const Params& p, const W& w, int batch, int head,
                                      const float (&inverse)[2], const float* v_mean) {
  const OutputRow<DTYPE> rows[2] = {p.out.row<DTYPE>(batch, head, w.row(0)),
                                    p.out.row<DTYPE>(batch, head, w.row(1))};
#pragma unroll
  for (int n = 0; n < W::OUT_TILES; ++n) {
    const int channel = 8 * n + 2 * w.t();
    if (channel >= p.head_dim) continue;
    const float2 mean = __ldg(reinterpret_cast<const float2*>(v_mean + channel));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool blind = inverse[r] == 0.0f;
      const float x = fmaf(w.out[n][2 * r], inverse[r], blind ? 0.0f : mean.x);
      const float y = fmaf(w.out[n][2 * r + 1], inverse[r], blind ? 0.0f : mean.y);
      if (w.row(r) < p.q_len) rows[r].store(channel, x, y);
    }
  }
}

template <typename W>
__device__ __forceinline__ void finish(const Params& p, const W& w, int batch, int head,
                                       s64 head_row, s64 kv_head) {
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = w.sum[2 * r];
    inverse[r] = sum == 0.0f ? 0.0f : p.kv_scales[kv_head * 2 + 1] / sum;
    inverse[r] = fmaf(w.scores.witness(r), 0.0f, inverse[r]);
    if (p.lse != nullptr && w.t() == 0 && w.row(r) < p.q_len) {
      p.lse[head_row + w.row(r)] = log_of_sum(w.reference[r], sum, LOG2_P_UNIT);
    }
  }
  const float* v_mean = p.v_mean + kv_head * W::OUT_TILES * 8;
  if (p.out_dtype == BF16) {
    store<BF16>(p, w, batch, head, inverse, v_mean);
  } else if (p.out_dtype == F16) {
    store<F16>(p, w, batch, head, inverse, v_mean);
  } else {
    store<F32>(p, w, batch, head, inverse, v_mean);
  }
}

// TILE_BLOCKS: of keys, in a stage.
template <typename Fp4, typename Scores, int WARPS, int STAGES, int TILE_BLOCKS, bool MASKED>
__global__ void __launch_bounds__(32 * WARPS, 1)
sm120_fp4_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  using W = Warp<Fp4, Scores, MASKED>;
  constexpr int ROWS = WARPS * WARP_ROWS, TILE_KEYS = TILE_BLOCKS * BLOCK_KEYS;
  const int warp = threadIdx.x / 32;
  // One grid dimension, as the others end at 65535 heads or batches. Longest rows first, so that a
  // causal call's last blocks are its short ones.
  int row_block = blockIdx.x % p.row_blocks + p.first_row_block;
  if (p.causal) row_block = 2 * p.first_row_block + p.row_blocks - 1 - row_block;
  const int in_launch = blockIdx.x / p.row_blocks;
  const int batch_head = in_launch + p.first_head;
  const int head = batch_head % p.q_heads, batch = batch_head / p.q_heads;
  const s64 kv_head = static_cast<s64>(batch) * p.kv_heads + head / (p.q_heads / p.kv_heads);
  const s64 head_row = static_cast<s64>(batch_head) * p.q_len;
  const int keys = p.causal ? min(p.kv_len, (row_block + 1) * ROWS) : p.kv_len;
  const int tiles = (keys + TILE_KEYS - 1) / TILE_KEYS;

  Ring<Scores, WARPS, STAGES, TILE_BLOCKS> ring;
  ring.shared = shared_address_of(shared);
  ring.kv = p.kv + kv_head * p.kv_blocks * W::Block::BYTES;
  ring.kv_blocks = p.kv_blocks;
  ring.delta = p.delta + (static_cast<s64>(in_launch) * p.row_blocks + row_block - p.first_row_block) *
                             (Q_BLOCKS * DELTA_BYTES) * p.kv_blocks;
  ring.start();
#pragma unroll
  for (int i = 0; i < ring.AHEAD; ++i) {
    if (threadIdx.x == 0 && i < tiles) ring.fetch(i);
    ring.next_fetch();
  }

  const int q_block = row_block * Q_BLOCKS + warp / (WARPS / Q_BLOCKS);
  W w;
  w.start(p, kv_head, static_cast<s64>(batch_head) * p.q_blocks + q_block, head_row,
          row_block * ROWS + warp * WARP_ROWS);
  const int end = p.kv_len - 1;
  const int last_key[2] = {p.causal ? min(w.row(0), end) : end, p.causal ? min(w.row(1), end) : end};
  const int first_last = p.causal ? min(w.first_row, end) : end;
  const int last_last = p.causal ? min(w.first_row + WARP_ROWS - 1, end) : end;
  const u32 delta = ring.KV_BYTES + warp / (WARPS / Q_BLOCKS) * ring.DELTA_TILE;

#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    if (threadIdx.x == 0 && tile + ring.AHEAD < tiles) {
      ring.wait_until_empty();
      ring.fetch(tile + ring.AHEAD);
    }
    ring.next_fetch();
    const u32 start = ring.wait();
#pragma unroll Fp4::BLOCKS_UNROLLED
    for (int i = 0; i < TILE_BLOCKS; ++i) {
      const int first_key = tile * TILE_KEYS + i * BLOCK_KEYS;
      if (first_key > last_last) break;
      w.add_block(start + i * W::Block::BYTES, start + delta + i * DELTA_BYTES, p.mask, batch, head,
                  p.q_len, p.kv_len, first_key, last_key, first_key + BLOCK_KEYS - 1 > first_last);
    }
    ring.leave();
  }
  finish(p, w, batch, head, head_row, kv_head);
}

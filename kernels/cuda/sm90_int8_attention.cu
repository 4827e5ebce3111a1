// INT8 attention on compute capability 9.0: Q K^T in s8 x s8, P V in u8 x u8, both as wgmma.
//
// A block has four warpgroups. One brings K and V in, tile by tile; the other three take 64 rows of Q
// each: scores, P (see int8_probabilities.cuh), P V, one after the other. While the tensor cores work
// for one of them, the others turn scores into P. Two warpgroups that overlap all of this within
// themselves were slower: two warps do not fill a scheduler. docs/kernel-notes-int8.md takes apart
// what an SM spends on a tile.
#include "output.cuh"
#include "place.cuh"
#include "sm90_int8_exponents.cuh"
#include "wgmma.cuh"

struct Params {
  const u8* q_codes;        // [B, Hq, Nq, HEAD_DIM]
  const float* q_scales;    // [B, Hq, Nq], times the softmax scale and log2(e)
  const u8* k_codes;        // [B, Hk, blocks / 2, 2 * BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  const u8* v_codes;        // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM]
  const float* k_scales;    // [B, Hk, blocks, SCALES_PER_BLOCK]
  const float* v_channels;  // [B, Hk, 2, HEAD_DIM]: scales and offsets
  Output out;
  float* lse;  // [B, Hq, Nq] of the scores of smoothed K, natural logarithm; may be null
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K per (batch, key head), even
  int causal;
  Dtype dtype;  // of the output
};

constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 160;

// ROWS rows of one head of Q against all of the head's keys: the work of a block.
struct Item : Place<ROWS> {
  using Place<ROWS>::Place;

  __device__ __forceinline__ int tiles(const Params& p) const {
    return (keys(p) + KEYS - 1) / KEYS;
  }
};

// K and V, by one thread.
template <int HEAD_DIM, int STAGES>
__device__ __forceinline__ void produce(const Params& p, const Item& item,
                                        const Shared<HEAD_DIM, STAGES>& shared) {
  constexpr int TILE = Shared<HEAD_DIM, STAGES>::TILE, SCALES = Shared<HEAD_DIM, STAGES>::SCALES;
  const s64 first_block = item.kv_head(p) * p.blocks;
  const u8* k = p.k_codes + first_block * (BLOCK_KEYS * HEAD_DIM);
  const u8* v = p.v_codes + first_block * (BLOCK_KEYS * HEAD_DIM);
  const u8* scales = reinterpret_cast<const u8*>(p.k_scales + first_block * SCALES_PER_BLOCK);
  const u8* v_channels =
      reinterpret_cast<const u8*>(p.v_channels + item.kv_head(p) * 2 * HEAD_DIM);
  const int tiles = item.tiles(p);
  Turn<STAGES> turn;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = turn.stage;
    const Barrier full_k = shared.full_k(stage), full_v = shared.full_v(stage);
    shared.empty_k(stage).wait(turn.parity ^ 1);  // which new barriers let pass
    full_k.expect(TILE + SCALES);
    full_k.copy(shared.k(stage), k, TILE);
    full_k.copy(shared.k_scales(stage), scales, SCALES);
    shared.empty_v(stage).wait(turn.parity ^ 1);
    // From memory they would hold up the end: one round trip for every store, 7 us for a block.
    const u32 first = tile == 0 ? shared.V_CHANNELS_BYTES : 0;
    full_v.expect(TILE + first);
    if (tile == 0) full_v.copy(shared.v_channels(), v_channels, first);
    full_v.copy(shared.v(stage), v, TILE);
    k += TILE, v += TILE, scales += SCALES;
    turn.advance();
  }
}

// 64 rows of Q against one tile after the other: a warpgroup's work, of which a thread holds two
// rows, 8 apart, and of every eight columns two.
template <int HEAD_DIM, int STAGES>
struct Consumer {
  using Product = u32[HEAD_DIM / 2];

  const Shared<HEAD_DIM, STAGES> shared;
  const int group;  // among consumers
  Turn<STAGES> turn;
  int block_row;  // the block's first row
  float q_scale[2];
  float out[HEAD_DIM / 2];
  float sum[2];        // this thread's part of its rows' sums of P
  float reference[2];  // what `out` and `sum` are measured by
  u32 probabilities[KEYS / 32][4];
  float weight[2];  // of P V in `out`

  __device__ __forceinline__ explicit Consumer(const Shared<HEAD_DIM, STAGES>& s)
      // Read from a lane, for the compiler to see that a warp has one, which uniform registers hold.
      : shared(s), group(__shfl_sync(0xffffffff, threadIdx.x / GROUP - 1, 0)) {}

  __device__ __forceinline__ int first_row() const { return block_row + group * GROUP_ROWS; }
  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }
  __device__ __forceinline__ int row(int r) const {
    return first_row() + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
  }

  __device__ __forceinline__ void take(const Params& p, const Item& item) {
    start(p, item.row_block, item.first_row(p));
    const int tiles = item.tiles(p);
    Scores s;
    Product product;
    // Of no use, but ptxas 12.8 ends every product at once where one begins on what nothing defined.
    clear(s), clear(product);
    for (int tile = 0; tile < tiles; ++tile) take_tile(p, s, product, tile);
    if (p.dtype == F16) {
      store<F16>(p, item);
    } else if (p.dtype == BF16) {
      store<BF16>(p, item);
    } else {
      store<F32>(p, item);
    }
  }

 private:
  __device__ __forceinline__ void start(const Params& p, int row_block, s64 head_row) {
    block_row = row_block * ROWS;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      q_scale[r] = p.q_scales[head_row + min(row(r), p.q_len - 1)];
      sum[r] = weight[r] = 0.0f;
      reference[r] = -FLOAT_MAX;
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.0f;
    constexpr int UNITS = HEAD_DIM / 16;
#pragma unroll
    for (int i = threadIdx.x % GROUP; i < GROUP_ROWS * UNITS; i += GROUP) {
      const int in_group = i / UNITS, unit = i % UNITS;
      const s64 source = head_row + min(first_row() + in_group, p.q_len - 1);
      store_shared_words(
          shared.q(group) + unit / 2 * (GROUP_ROWS * 32) + panel_offset(in_group, unit % 2 * 16),
          *reinterpret_cast<const uint4*>(p.q_codes + source * HEAD_DIM + unit * 16));
    }
    publish_to_wgmma();
    synchronise<GROUP>(1 + group);
  }

  template <int N>
  static __device__ __forceinline__ void clear(u32 (&accumulators)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) accumulators[i] = 0;
  }

  // s, product: room for the tile's scores, for its P V.
  __device__ __forceinline__ void take_tile(const Params& p, Scores& s, Product& product,
                                            int tile) {
    multiply_keys(s);
    const int end = (tile + 1) * KEYS;
    if (end > p.kv_len || p.causal && end > block_row + 1) hide_keys(p, s, tile * KEYS);
    Exponents e;
    e.find(s, q_scale, shared.k_scales(turn.stage) + t() * 4);
    shared.empty_k(turn.stage).arrive();
    follow(e.top);
    find_p(s, e);
    multiply_values(product);
    shared.empty_v(turn.stage).arrive();
    add(product);
    turn.advance();
  }

  template <Dtype DTYPE>
  __device__ __forceinline__ void store(const Params& p, const Item& item) const {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      if (p.lse != nullptr && t() == 0 && row(r) < p.q_len) {
        p.lse[item.first_row(p) + row(r)] = log_of_sum(reference[r], total, LOG2_UNIT);
      }
      inverse[r] = 1.0f / total;
    }
    const OutputRow<DTYPE> rows[2] = {p.out.row<DTYPE>(item.batch, item.head, row(0)),
                                      p.out.row<DTYPE>(item.batch, item.head, row(1))};
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const int channel = 8 * n + 2 * t();
      float scale[2], offset[2];
      load_shared_floats(scale, shared.v_channels() + channel * 4);
      load_shared_floats(offset, shared.v_channels() + (HEAD_DIM + channel) * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row(r) >= p.q_len || channel >= p.head_dim) continue;
        rows[r].store(channel, fmaf(out[4 * n + 2 * r] * inverse[r], scale[0], offset[0]),
                      fmaf(out[4 * n + 2 * r + 1] * inverse[r], scale[1], offset[1]));
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(Scores& s) const {
    const WgmmaOperand q = WgmmaOperand::panel(shared.q(group));
    const WgmmaOperand k = WgmmaOperand::panel(shared.k(turn.stage));
    shared.full_k(turn.stage).wait(turn.parity);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 32; ++step) {
      wgmma_s8(s, q + step * (GROUP_ROWS * 32), k + step * (KEYS * 32), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
  }

  __device__ __forceinline__ void multiply_values(Product& product) const {
    const WgmmaOperand v = WgmmaOperand::panel(shared.v(turn.stage));
    shared.full_v(turn.stage).wait(turn.parity);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < KEYS / 32; ++step) {
      wgmma_u8(product, probabilities[step], v + step * (HEAD_DIM * 32), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(product);
  }

  __device__ __forceinline__ void hide_keys(const Params& p, Scores& s, int first_key) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int last_key = p.causal ? min(row(r), p.kv_len - 1) : p.kv_len - 1;
      const int visible = last_key + 1 - first_key - 4 * t();
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) {
        if (i / 4 * 16 + i % 4 >= visible) s[i / 2 * 4 + 2 * r + i % 2] = HIDDEN;
      }
    }
  }

  // P of a tile, its weight, and what both add to the sums.
  __device__ __forceinline__ void find_p(const Scores& s, const Exponents& e) {
    u32 total[2] = {0, 0};
    float x[2][8];  // of these sixteen keys and of those before
#pragma unroll
    for (int sixteen = 0; sixteen <= KEYS / 16; ++sixteen) {
      if (sixteen < KEYS / 16) e.raise(s, sixteen, total, x[sixteen % 2]);
      if (sixteen > 0) pack(x[(sixteen + 1) % 2], sixteen - 1, total);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] = weight_of(e.top[r], reference[r]);
      sum[r] = fmaf(as_float(total[r]), weight[r], sum[r]);
    }
  }

  __device__ __forceinline__ void pack(const float (&x)[8], int sixteen, u32 (&total)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 bytes = round_to_bytes(x[2 * r], x[2 * r + 1], x[2 * r + 4], x[2 * r + 5]);
      probabilities[sixteen / 2][sixteen % 2 * 2 + r] = bytes;
      total[r] = add_bytes(bytes, total[r]);
    }
  }

  // Moves the references of rows whose tops left them behind.
  __device__ __forceinline__ void follow(const float (&top)[2]) {
    float shrink[2];
    if (!follow_tops(top, reference, sum, shrink)) return;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] *= shrink[i / 2 % 2];
  }

  __device__ __forceinline__ void add(const Product& product) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) {
      out[i] = fmaf(as_float(product[i]), weight[i / 2 % 2], out[i]);
    }
  }
};

template <int HEAD_DIM, int STAGES>
__global__ void __launch_bounds__((1 + CONSUMERS) * GROUP, 1)
sm90_int8_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 memory[];
  const Shared<HEAD_DIM, STAGES> shared{shared_address_of(memory)};
  const Item item(p, blockIdx.x);
  if (threadIdx.x == 0) shared.start();
  __syncthreads();
  if (threadIdx.x < GROUP) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(p, item, shared);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    Consumer<HEAD_DIM, STAGES>(shared).take(p, item);
  }
}

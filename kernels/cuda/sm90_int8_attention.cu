// INT8 attention on compute capability 9.0: Q K^T in 8 bits, P V in 16, both as wgmma.
//
// A block has three warpgroups. One brings K and V in, tile by tile; the other two take 64 rows of Q
// each. While the tensor cores multiply P of one tile by V, a warpgroup turns the scores of the next
// one into P, and the other warpgroup fills what gaps are left.
//
// P V takes V as the caller has it. In 8 bits it would take half as long, but bringing its integers
// into FP32 costs two instructions for each element of the output and tile, and then instructions
// are what binds: by count, both ways end near 1280 TOPS, and this one reads V once and loses less.
#include "int8_layout.cuh"
#include "output.cuh"
#include "pipeline.cuh"
#include "rows.cuh"
#include "wgmma.cuh"

struct Params {
  const u8* q_codes;      // [B, Hq, Nq, HEAD_DIM]
  const float* q_scales;  // [B, Hq, Nq], times the softmax scale and log2(e)
  const u8* k_codes;      // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  const float* k_scales;  // [B, Hk, blocks, SCALES_PER_BLOCK]
  Tensor v;
  Output out;
  float* lse;  // [B, Hq, Nq] of the scores of smoothed K, natural logarithm; may be null
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K per (batch, key head)
  int causal;
};

constexpr int GROUP = 128;      // threads of a warpgroup
constexpr int GROUP_ROWS = 64;  // of Q
constexpr int CONSUMERS = 2;    // warpgroups
constexpr int ROWS = CONSUMERS * GROUP_ROWS;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int PRODUCER_LEAD = 2;  // tiles of V whose copies are under way

// Exponents may exceed a row's reference by this much before the accumulator is rescaled.
constexpr float REFERENCE_SLACK = 8.0f;
// P is 2^(exponent - reference + LOG2_UNIT): as large as FP16 takes, and in BF16 so small that sums
// of the largest values of V stay finite.
template <Dtype DTYPE>
constexpr float LOG2_UNIT = DTYPE == F16 ? 7.0f : -18.0f;
// Factors from integer scores to exponents: products with scores and with infinity must exist.
constexpr float SMALLEST_FACTOR = 1.2e-38f, LARGEST_FACTOR = 1e30f;

// Tiles of K and V in shared memory, and who may touch them when.
template <int HEAD_DIM, int KEYS, int STAGES>
struct Ring {
  static constexpr int K_BYTES = KEYS * HEAD_DIM, V_BYTES = KEYS * HEAD_DIM * 2;
  static constexpr int STAGE = V_BYTES + K_BYTES;
  static constexpr int BYTES = STAGES * (STAGE + 3 * 8);

  u32 shared;

  __device__ __forceinline__ u32 v(int stage) const { return shared + stage * STAGE; }
  __device__ __forceinline__ u32 k(int stage) const { return v(stage) + V_BYTES; }
  __device__ __forceinline__ Barrier full_k(int stage) const { return barrier(3 * stage); }
  __device__ __forceinline__ Barrier full_v(int stage) const { return barrier(3 * stage + 1); }
  __device__ __forceinline__ Barrier empty(int stage) const { return barrier(3 * stage + 2); }

  // By one thread, before a __syncthreads().
  __device__ __forceinline__ void start() const {
    for (int stage = 0; stage < STAGES; ++stage) {
      full_k(stage).init(1);
      full_v(stage).init(GROUP);
      empty(stage).init(CONSUMERS * GROUP / 32);
    }
    publish_barriers();
  }

 private:
  __device__ __forceinline__ Barrier barrier(int i) const {
    return {shared + STAGES * STAGE + i * 8};
  }
};

// A tile's stage and the parity of that stage's phase.
template <int STAGES>
struct Turn {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// V of one tile after the other as wgmma wants it: rows of keys in the order of K's rows, 64 channels
// wide. A thread copies 16 bytes of every 16th key or of two.
template <int HEAD_DIM, int KEYS, Dtype DTYPE>
struct Values {
  static constexpr int UNITS = HEAD_DIM / 8;  // of 16 bytes in a row
  static constexpr int COPIES = 16 * UNITS / GROUP;

  const char* source;  // of the first copy, which moves on from tile to tile
  s64 stride;          // of a token, in bytes
  int key, end;        // of the first copy, and the first absent one
  u32 target[COPIES];  // offsets in a stage

  __device__ __forceinline__ Values(const Params& p, int batch, int head) {
    const int unit = threadIdx.x % UNITS;
    key = threadIdx.x / UNITS;
    source = p.v.token<DTYPE>(batch, head, key) + unit * 16;
    stride = p.v.token_stride * 2;
    end = 8 * unit < p.head_dim ? p.kv_len : 0;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int row = row_of_key(key + 8 * i);
      target[i] = unit / 8 * (KEYS * 128) + row * 128 + (unit % 8 ^ row % 8) * 16;
    }
  }

  __device__ __forceinline__ void fetch(u32 stage) {
#pragma unroll
    for (int pass = 0; pass < KEYS / 16; ++pass) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        copy_16_bytes_or_zeros_async(stage + target[i] + pass * (16 * 128), source + 8 * i * stride,
                                     key + 8 * i < end);
      }
      source += 16 * stride, key += 16;
    }
  }
};

template <int HEAD_DIM, int KEYS, Dtype DTYPE, int STAGES>
__device__ __forceinline__ void produce(const Params& p, const Ring<HEAD_DIM, KEYS, STAGES>& ring,
                                        int batch, int kv_head, int tiles) {
  const u8* k = p.k_codes + (static_cast<s64>(batch) * p.kv_heads + kv_head) * p.blocks *
                                (BLOCK_KEYS * HEAD_DIM);
  Values<HEAD_DIM, KEYS, DTYPE> values(p, batch, kv_head);
  Turn<STAGES> fetched, arrived;
  for (int tile = 0; tile < tiles + PRODUCER_LEAD; ++tile) {
    if (tile < tiles) {
      if (tile >= STAGES) ring.empty(fetched.stage).wait(fetched.parity ^ 1);
      if (threadIdx.x == 0) {
        const Barrier barrier = ring.full_k(fetched.stage);
        barrier.expect(ring.K_BYTES);
        barrier.copy(ring.k(fetched.stage), k, ring.K_BYTES);
        k += ring.K_BYTES;
      }
      values.fetch(ring.v(fetched.stage));
      fetched.advance();
    }
    commit_copies();
    wait_for_copies<PRODUCER_LEAD>();
    if (tile >= PRODUCER_LEAD) {
      publish_to_wgmma();
      ring.full_v(arrived.stage).arrive();
      arrived.advance();
    }
  }
}

// 64 rows of Q against one tile after the other: a warpgroup's work, of which a thread holds two
// rows, 8 apart, and of every eight columns two.
template <int HEAD_DIM, int KEYS, Dtype DTYPE, int STAGES, bool TAKES_TURNS>
struct Consumer {
  using Scores = u32[KEYS / BLOCK_KEYS][32];  // integers, then floats
  using Probabilities = u32[KEYS / 16][4];
  static constexpr int STEPS = HEAD_DIM / 32, BLOCKS = KEYS / BLOCK_KEYS;

  const Ring<HEAD_DIM, KEYS, STAGES>& ring;
  u32 q[STEPS][4];
  float q_scale[2];
  float out[HEAD_DIM / 2];
  float sum[2] = {0.0f, 0.0f};  // this thread's part of its rows' sums of P
  float reference[2] = {-FLOAT_MAX, -FLOAT_MAX};
  const float* k_scales;  // of this lane's keys
  int first_row, last_tile;
  int whole_tiles;  // that all rows of the warpgroup see whole
  int last_key[2];  // that a row sees
  Scores s;
  float shrink[2];  // what the references' last move does to `out`
  bool moved;
  Turn<STAGES> k_turn, v_turn;

  __device__ __forceinline__ explicit Consumer(const Ring<HEAD_DIM, KEYS, STAGES>& r) : ring(r) {}

  static __device__ __forceinline__ int group() { return threadIdx.x / GROUP - 1; }
  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }
  __device__ __forceinline__ int row(int r) const {
    return first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
  }

  __device__ __forceinline__ void start(const Params& p, int row_block, s64 head_row, s64 kv_head,
                                        int tiles) {
    first_row = row_block * ROWS + group() * GROUP_ROWS;
    last_tile = tiles - 1;
    whole_tiles = (p.causal ? min(p.kv_len, first_row + 1) : p.kv_len) / KEYS;
    k_scales = p.k_scales + kv_head * p.blocks * SCALES_PER_BLOCK + t();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const s64 source = head_row + min(row(r), p.q_len - 1);
      const u32* words = reinterpret_cast<const u32*>(p.q_codes + source * HEAD_DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        q[step][r] = words[8 * step + t()];
        q[step][r + 2] = words[8 * step + 4 + t()];
      }
      q_scale[r] = p.q_scales[source];
      last_key[r] = p.causal ? min(row(r), p.kv_len - 1) : p.kv_len - 1;
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.0f;
  }

  // Begins S = Q K^T of the next tile.
  __device__ __forceinline__ void multiply_keys() {
    const WgmmaOperand k = WgmmaOperand::panel(ring.k(k_turn.stage));
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        wgmma_s8(s[block], q[step], k + block * (BLOCK_KEYS * HEAD_DIM) + step * (BLOCK_KEYS * 32),
                 step > 0);
      }
    }
    wgmma_commit();
    k_turn.advance();
  }

  // Begins out += P V of the next tile.
  __device__ __forceinline__ void multiply_values(const Probabilities& probabilities) {
    const WgmmaOperand v =
        WgmmaOperand::rows_of_128_bytes(ring.v(v_turn.stage), KEYS * 128);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      wgmma_16bit<DTYPE>(out, probabilities[step], v + step * (16 * 128));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void leave_tile() {
    if (threadIdx.x % 32 == 0) ring.empty(v_turn.stage).arrive();
    v_turn.advance();
  }

  // From the scores of `tile` to P.
  __device__ __forceinline__ void find_p(int tile, Probabilities& probabilities) {
    float k_scale[BLOCKS];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      k_scale[block] = __ldg(k_scales + (tile * BLOCKS + block) * SCALES_PER_BLOCK);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        // An integer beside MAGIC is a float; I2F would take the unit of the exponentials.
        s[block][i] = as_bits(as_float(s[block][i] + MAGIC_BITS) - MAGIC);
      }
    }
    if (tile >= whole_tiles) hide_keys(tile * KEYS);
    float factor[2][BLOCKS];
    moved = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -FLOAT_MAX;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        float largest = as_float(s[block][2 * r]);
#pragma unroll
        for (int i = 1; i < 16; ++i) {
          largest = fmaxf(largest, as_float(s[block][i / 2 * 4 + 2 * r + i % 2]));
        }
        factor[r][block] =
            max_nan(min_nan(q_scale[r] * k_scale[block], LARGEST_FACTOR), SMALLEST_FACTOR);
        top = max_nan(top, largest * factor[r][block]);
      }
      top = max_nan(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = max_nan(top, __shfl_xor_sync(0xffffffff, top, 2));
      const bool moves = top > reference[r] + REFERENCE_SLACK;
      const float target = moves ? top : reference[r];
      shrink[r] = exp2_approx(reference[r] - target);
      reference[r] = target;
      moved = moved || moves;
      sum[r] *= shrink[r];
    }
    moved = __any_sync(0xffffffff, moved);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      const int block = step / 4;
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int r = word % 2, i = step % 4 * 8 + word / 2 * 4 + 2 * r;
        const float shift = LOG2_UNIT<DTYPE> - reference[r];
        const float x = exp2_approx(fmaf(as_float(s[block][i]), factor[r][block], shift));
        const float y = exp2_approx(fmaf(as_float(s[block][i + 1]), factor[r][block], shift));
        sum[r] += x + y;
        probabilities[step][word] = DTYPE == F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
      }
    }
  }

  __device__ __forceinline__ void pin_scores() {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) pin(s[block]);
  }

  __device__ __forceinline__ void hide_keys(int first_key) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int in_tile = block * BLOCK_KEYS + i / 8 * 16 + 4 * t() + i / 4 % 2 * 2 + i % 2;
        if (first_key + in_tile > last_key[i / 2 % 2]) s[block][i] = NEGATIVE_INFINITY_BITS;
      }
    }
  }

  // The first tile, of which no P waits yet.
  __device__ __forceinline__ void begin(Probabilities& first) {
    ring.full_k(k_turn.stage).wait(k_turn.parity);
    wgmma_begin();
    multiply_keys();
    wgmma_wait<0>();
    pin_scores();
    find_p(0, first);
  }

  // P V of `tile`, and P of the one after it.
  __device__ __forceinline__ void turn(int tile, Probabilities& now, Probabilities& next) {
    ring.full_k(k_turn.stage).wait(k_turn.parity);
    ring.full_v(v_turn.stage).wait(v_turn.parity);
    if constexpr (TAKES_TURNS) synchronise<CONSUMERS * GROUP>(1 + group());
    wgmma_begin();
    multiply_keys();
    multiply_values(now);
    if constexpr (TAKES_TURNS) {
      if (group() == 0 || tile + 1 < last_tile) arrive<CONSUMERS * GROUP>(2 - group());
    }
    wgmma_wait<1>();
    pin_scores();
    find_p(tile + 1, next);
    // The wait stands in two branches, as ptxas moves it before P within one stretch of code.
    if (moved) {
      wgmma_wait<0>();
      pin(out);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] *= shrink[i / 2 % 2];
    } else {
      asm volatile("wgmma.wait_group.sync.aligned 0; // nothing moves" ::: "memory");
      pin(out);
    }
    leave_tile();
  }

  // P V of the last tile.
  __device__ __forceinline__ void end(const Probabilities& now) {
    ring.full_v(v_turn.stage).wait(v_turn.parity);
    wgmma_begin();
    multiply_values(now);
    wgmma_wait<0>();
    pin(out);
  }

  __device__ __forceinline__ void run() {
    Probabilities even, odd;
    if constexpr (TAKES_TURNS) {
      if (group() == 1 && last_tile > 0) arrive<CONSUMERS * GROUP>(1);
    }
    begin(even);
    for (int tile = 0;; tile += 2) {
      if (tile == last_tile) return end(even);
      turn(tile, even, odd);
      if (tile + 1 == last_tile) return end(odd);
      turn(tile + 1, odd, even);
    }
  }

  __device__ __forceinline__ void store(const Params& p, int batch, int head, s64 head_row) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      if (row(r) >= p.q_len) continue;
      if (p.lse != nullptr && t() == 0) {
        p.lse[head_row + row(r)] = log_of_sum(reference[r], total, LOG2_UNIT<DTYPE>);
      }
      const float inverse = 1.0f / total;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        const int channel = 8 * n + 2 * t();
        if (channel >= p.head_dim) continue;
        p.out.template store<DTYPE>(batch, head, row(r), channel, out[4 * n + 2 * r] * inverse,
                                    out[4 * n + 2 * r + 1] * inverse);
      }
    }
  }
};

template <int HEAD_DIM, int KEYS, Dtype DTYPE, int STAGES, bool TAKES_TURNS>
__global__ void __launch_bounds__((1 + CONSUMERS) * GROUP, 1)
sm90_int8_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  const Ring<HEAD_DIM, KEYS, STAGES> ring{shared_address_of(shared)};
  const int row_blocks = (p.q_len + ROWS - 1) / ROWS;
  const int batch_head = blockIdx.x / row_blocks;
  int row_block = blockIdx.x % row_blocks;
  if (p.causal) row_block = row_blocks - 1 - row_block;  // the longest first
  const int head = batch_head % p.q_heads, batch = batch_head / p.q_heads;
  const int kv_head = head / (p.q_heads / p.kv_heads);
  const int keys = p.causal ? min(p.kv_len, (row_block + 1) * ROWS) : p.kv_len;
  const int tiles = (keys + KEYS - 1) / KEYS;
  if (threadIdx.x == 0) ring.start();
  __syncthreads();
  if (threadIdx.x < GROUP) {
    give_registers<PRODUCER_REGISTERS>();
    produce<HEAD_DIM, KEYS, DTYPE>(p, ring, batch, kv_head, tiles);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    const s64 head_row = static_cast<s64>(batch_head) * p.q_len;
    Consumer<HEAD_DIM, KEYS, DTYPE, STAGES, TAKES_TURNS> consumer(ring);
    consumer.start(p, row_block, head_row, static_cast<s64>(batch) * p.kv_heads + kv_head, tiles);
    consumer.run();
    consumer.store(p, batch, head, head_row);
  }
}

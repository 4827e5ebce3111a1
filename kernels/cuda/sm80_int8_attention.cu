// Third launch of INT8 attention: both matrix products in 8 bits, the softmax between them in FP32.
// int8_warp.cuh says how; here is how blocks of warps share K and V, and how a row ends.
#include "int8_warp.cuh"
#include "output.cuh"
#include "place.cuh"

struct Params {
  const u8* q_codes;        // [B, Hq, Nq, HEAD_DIM]
  const float* q_scales;    // [B, Hq, Nq], times the softmax scale and log2(e)
  const u8* k_codes;        // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  const u8* v_codes;        // likewise
  const float* k_scales;    // [B, Hk, blocks, SCALES_PER_BLOCK]
  const float* v_channels;  // [B, Hk, 2, HEAD_DIM]: scales and offsets
  Mask mask;
  Output out;
  float* lse;  // [B, Hq, Nq] of the scores of smoothed K, natural logarithm; may be null
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K and V per (batch, key head)
  int causal;
  int out_dtype;
};

// Tiles of K and V in shared memory. Stage x % 2 holds what is read in turn x, and takes in the
// next turn's copies when all warps have left it.
template <int HEAD_DIM, int KEYS, int WARPS>
struct Stages {
  static constexpr int CODES = KEYS * HEAD_DIM;  // bytes of a tile of K or of V
  // A warp's share is in one piece: the offsets of its copies then fit into the instructions.
  static constexpr int SHARE = CODES / WARPS;
  static_assert(SHARE % 512 == 0, "a warp copies 512 bytes at a time");

  u32 read;         // shared address of stage 0 plus this lane's offset for ldmatrix
  u32 write;        // shared address of this thread's first bytes in stage 0
  const u8 *k, *v;  // this thread's first bytes of tile 0
  int last;         // tile

  __device__ __forceinline__ Stages(u32 shared, const u8* k_codes, const u8* v_codes, int tiles) {
    const int lane = threadIdx.x % 32, offset = threadIdx.x / 32 * SHARE + lane * 16;
    read = shared + ldmatrix_offset(lane), write = shared + offset;
    k = k_codes + offset, v = v_codes + offset;
    last = tiles - 1;
  }

  static __device__ __forceinline__ u32 start(int turn) { return turn % 2 * (2 * CODES); }
  __device__ __forceinline__ u32 k_of(int turn) const { return read + start(turn); }
  __device__ __forceinline__ u32 v_of(int turn) const { return read + start(turn) + CODES; }

  // Begin the copies of a turn; beyond the last tile they copy that one, instead of asking.
  __device__ __forceinline__ void fetch_k(int turn, int tile) const {
    copy<0>(write + start(turn), k + static_cast<s64>(min(tile, last)) * CODES);
  }
  __device__ __forceinline__ void fetch_v(int turn, int tile) const {
    copy<0>(write + start(turn) + CODES, v + static_cast<s64>(min(tile, last)) * CODES);
  }

 private:
  template <int BYTE>
  static __device__ __forceinline__ void copy(u32 target, const u8* source) {
    copy_16_bytes_async(target + BYTE, source + BYTE);
    if constexpr (BYTE + 512 < SHARE) copy<BYTE + 512>(target, source);
  }
};

// True if the factors of all keys and of this thread's rows are small enough for the fast path.
__device__ __forceinline__ bool has_small_factors(const float (&q_scale)[2], const float* k_scales,
                                                  int blocks, int threads) {
  const float largest_q = fmaxf(q_scale[0], q_scale[1]);
  float largest_k = 0.0f;
  for (int block = threadIdx.x; block < blocks; block += threads) {
    const float4 k = reinterpret_cast<const float4*>(k_scales)[block];
    largest_k = fmaxf(largest_k, fmaxf(fmaxf(k.x, k.y), fmaxf(k.z, k.w)));
  }
  const float limit = 0.088388347f;  // its square is LARGEST_FAST_FACTOR
  return !__syncthreads_or(largest_q > limit || largest_k > limit);
}

// O = out / sum in V's units, with V's mean back; a row that saw no key gives zeros.
template <Dtype DTYPE, int HEAD_DIM, int KEYS>
__device__ __forceinline__ void store(const Params& p, const Warp<HEAD_DIM, KEYS>& w, int batch,
                                      int head, const float (&inverse)[2],
                                      const float* v_channels) {
  const OutputRow<DTYPE> rows[2] = {p.out.row<DTYPE>(batch, head, w.row(0)),
                                    p.out.row<DTYPE>(batch, head, w.row(1))};
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; ++n) {
    const int channel = 8 * n + 2 * w.t();
    // __ldg: the stores before it might otherwise hold it up, one round trip after the other.
    const float2 scale = __ldg(reinterpret_cast<const float2*>(v_channels + channel));
    const float2 mean = __ldg(reinterpret_cast<const float2*>(v_channels + HEAD_DIM + channel));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool blind = inverse[r] == 0.0f;
      const float x = fmaf(w.out[n][2 * r] * inverse[r], scale.x, blind ? 0.0f : mean.x);
      const float y = fmaf(w.out[n][2 * r + 1] * inverse[r], scale.y, blind ? 0.0f : mean.y);
      if (w.row(r) < p.q_len && channel < p.head_dim) rows[r].store(channel, x, y);
    }
  }
}

template <int HEAD_DIM, int KEYS>
__device__ __forceinline__ void finish(const Params& p, const Warp<HEAD_DIM, KEYS>& w, int batch,
                                       int head, s64 head_row, const float* v_channels) {
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = w.sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    inverse[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (p.lse != nullptr && w.t() == 0 && w.row(r) < p.q_len) {
      p.lse[head_row + w.row(r)] = log_of_sum(w.reference[r], sum, LOG2_UNIT);
    }
  }
  if (p.out_dtype == BF16) {
    store<BF16>(p, w, batch, head, inverse, v_channels);
  } else if (p.out_dtype == F16) {
    store<F16>(p, w, batch, head, inverse, v_channels);
  } else {
    store<F32>(p, w, batch, head, inverse, v_channels);
  }
}

template <int HEAD_DIM, int KEYS, int WARPS, bool MASKED, int MIN_BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
sm80_int8_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  constexpr int ROWS = WARPS * WARP_ROWS;
  const Place<ROWS> place(p, block_index_anew());
  const int row_block = place.row_block, head = place.head, batch = place.batch;
  const int first_row = row_block * ROWS + threadIdx.x / 32 * WARP_ROWS;
  const int tiles = (place.keys(p) + KEYS - 1) / KEYS;
  const s64 head_row = place.first_row(p), kv_head = place.kv_head(p);
  const s64 kv_bytes = kv_head * p.blocks * (BLOCK_KEYS * HEAD_DIM);
  const float* k_scales = p.k_scales + kv_head * p.blocks * SCALES_PER_BLOCK;

  const Stages<HEAD_DIM, KEYS, WARPS> stages(shared_address_of(shared), p.k_codes + kv_bytes,
                                             p.v_codes + kv_bytes, tiles);
  stages.fetch_k(1, 0);
  commit_copies();
  using W = Warp<HEAD_DIM, KEYS>;
  W w;
  w.start(p.q_codes + head_row * HEAD_DIM, p.q_scales + head_row, first_row, p.q_len);
  auto read_k_scales = [&](float (&scales)[W::BLOCKS], int tile) {
    const float* source = k_scales + w.t() + tile * (W::BLOCKS * SCALES_PER_BLOCK);
#pragma unroll
    for (int i = 0; i < W::BLOCKS; ++i) scales[i] = source[i * SCALES_PER_BLOCK];
  };
  float k_scale[W::BLOCKS];
  int tile = 0;

  if constexpr (!MASKED) {
    // Tiles that every row of the block sees whole.
    int whole = (p.causal ? min(p.kv_len, row_block * ROWS + 1) : p.kv_len) / KEYS;
    if (!has_small_factors(w.q_scale, k_scales, tiles * W::BLOCKS, 32 * WARPS)) whole = 0;
    if (whole > 0) {
      stages.fetch_v(0, 0);
      stages.fetch_k(0, 1);
      commit_copies();
      wait_for_copies<1>();
      __syncthreads();
      typename W::Scores even, odd;
      w.multiply_keys(even, stages.k_of(1));
      read_k_scales(k_scale, 0);
      w.find_top(even, k_scale);
      // Turn x computes the scores of tile x + 1; after the last tile they are of no use.
      auto turn = [&](typename W::Scores& s, typename W::Scores& next, int parity) {
        read_k_scales(k_scale, min(tile + 1, stages.last));
        wait_for_copies<0>();
        __syncthreads();  // the tiles fetched last are there; those before are no longer read
        w.find_p(s, next, stages.k_of(parity), [&] {
          stages.fetch_v(parity + 1, tile + 1);
          stages.fetch_k(parity + 1, tile + 2);
          commit_copies();
        });
        w.follow_top();
        w.add_values(stages.v_of(parity), next, k_scale);
        ++tile;
      };
      while (true) {
        turn(even, odd, 0);
        if (tile == whole) break;
        turn(odd, even, 1);
        if (tile == whole) break;
      }
      wait_for_copies<0>();
      __syncthreads();
    }
  }

  // Tiles with keys that some row does not see, or with biases, or with large factors.
  if (tile < tiles) {
    stages.fetch_k(tile, tile);
    stages.fetch_v(tile, tile);
    commit_copies();
  }
  for (; tile < tiles; ++tile) {
    wait_for_copies<0>();
    __syncthreads();
    stages.fetch_k(tile + 1, tile + 1);
    stages.fetch_v(tile + 1, tile + 1);
    commit_copies();
    const int first_key = tile * KEYS;
    if (p.causal && first_key >= first_row + WARP_ROWS) continue;
    u32 visible[2][W::PAIRS];
    if constexpr (MASKED) {
      if (p.mask.dtype == BOOL &&
          !w.read_visibility(p.mask, batch, head, p.q_len, p.kv_len, first_key, visible)) {
        continue;
      }
    }
    typename W::Scores s;
    w.multiply_keys(s, stages.k_of(tile));
    read_k_scales(k_scale, tile);
    w.template hide_and_find_top<MASKED>(s, k_scale, p.mask, batch, head, p.q_len, p.kv_len,
                                         p.causal, first_key, visible);
    w.follow_top();
    w.add_exact(s, stages.v_of(tile));
  }
  // Read anew: what is kept over the loop costs registers.
  const Place<ROWS> end(p, block_index_anew());
  finish(p, w, end.batch, end.head, end.first_row(p), p.v_channels + end.kv_head(p) * 2 * HEAD_DIM);
}

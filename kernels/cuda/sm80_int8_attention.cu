// Third launch of INT8 attention: both matrix products in 8 bits, the softmax between them in FP32.
//
// S = Q K^T in s8 x s8. Each tile's P is quantised to 0..255 by its own row maximum; P V in u8 x s8
// is exact in integers and joins an FP32 accumulator, weighted by the tile's maximum. So a row's
// largest score elsewhere never costs a tile its resolution (the error of P at 16k normal tokens is
// 2.3% with the running maximum, 0.6% with this one), and nothing is rescaled as maxima grow.
//
// Integers become floats for free: the products start from the bits of 1.5 * 2^23, so that the
// sums, read as floats, are that number plus the integer.
#include "int8_layout.cuh"
#include "mask.cuh"
#include "ptx.cuh"

struct Params {
  const u8* q_codes;        // [B, Hq, Nq, HEAD_DIM]
  const float* q_scales;    // [B, Hq, Nq], times the softmax scale and log2(e)
  const u8* k_codes;        // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  const u8* v_codes;        // likewise
  const float* k_scales;    // [B, Hk, blocks, SCALES_PER_BLOCK]
  const float* v_channels;  // [B, Hk, 2, HEAD_DIM]: scales and means of V's channels
  Mask mask;
  void* out;  // [B, Hq, Nq, D], channels contiguous
  s64 out_batch_stride, out_head_stride, out_token_stride;  // in elements
  float* lse;  // [B, Hq, Nq] of the scores of smoothed K, natural logarithm; may be null
  int q_heads, kv_heads, q_len, kv_len, head_dim;
  int blocks;  // of K and V per (batch, key head)
  int causal;
  int out_dtype;
};

constexpr int THREADS = 128;
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
constexpr u32 MAGIC_BITS = 0x4b400000u;
constexpr int MAGIC_RANGE = 1 << 22;  // integers that MAGIC can carry
constexpr float LOG2_255 = 7.99435343685886f;
constexpr float LN_2 = 0.6931471805599453f;

// Exponents of the fast path are off by less than 4 score factors, downwards: P stays below 255.5.
// From this factor on (scores in the ten thousands) that would be felt, and the exact path is taken.
constexpr float LARGEST_FAST_FACTOR = 1.0f / 128;
constexpr float MAGIC_WITH_MARGIN = MAGIC + 4.0f;
constexpr float LARGEST_FACTOR = 1e30f;  // times any integer score it is still finite

// A row's accumulator is kept in units of 2^reference. The reference moves only when a tile's
// maximum leaves it this far below; FP32 has the range, and rows seldom need a second one.
constexpr float REFERENCE_SLACK = 64.0f;

// Adding P V as it comes, MAGIC included, saves an instruction per element; the sum of what MAGIC
// added is taken off after this many tiles, before it costs more than a unit of P V.
constexpr int TILES_PER_SETTLEMENT = 8;

template <int HEAD_DIM, int KEYS, int STAGES, int ROW_TILES, bool MASKED>
struct Warp {
  static constexpr int BLOCKS = KEYS / BLOCK_KEYS;
  static constexpr int PANEL = BLOCK_KEYS * 32;     // bytes of 32 channels of a block of K
  static constexpr int V_PANEL = HEAD_DIM * 32;     // bytes of 32 keys of a block of V
  static constexpr int BLOCK = BLOCK_KEYS * HEAD_DIM;  // bytes of a block of K or of V
  static_assert(HEAD_DIM * 127 * 127 < MAGIC_RANGE, "scores must fit beside MAGIC");
  static_assert(KEYS * 255 * 127 < MAGIC_RANGE, "products P V must fit beside MAGIC");

  u32 q[ROW_TILES][HEAD_DIM / 32][4];
  float q_scale[ROW_TILES][2];
  float out[ROW_TILES][HEAD_DIM / 8][4];
  float sum[ROW_TILES][2];        // this lane's part of the row's sum of P
  float reference[ROW_TILES][2];  // exponent of the unit of `out`, `sum` and `unsettled`
  float unsettled[ROW_TILES][2];  // what MAGIC added to `out`

  u32 s[ROW_TILES][KEYS / 8][4];  // scores: integers beside MAGIC, or exponents of two
  u32 p[ROW_TILES][KEYS / 32][4];
  float factor[ROW_TILES][2][BLOCKS];  // from scores to exponents
  float top[ROW_TILES][2];             // the tile's largest exponent per row

  int first_row, g, t;

  __device__ __forceinline__ int row(int m, int r) const { return first_row + 16 * m + 8 * r + g; }

  __device__ __forceinline__ void start(const Params& params, s64 head_row, int row0) {
    const int lane = threadIdx.x % 32;
    first_row = row0, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const s64 source = head_row + min(row(m, r), params.q_len - 1);
        const u32* words = reinterpret_cast<const u32*>(params.q_codes + source * HEAD_DIM);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 32; ++step) {
          q[m][step][r] = words[8 * step + t];
          q[m][step][r + 2] = words[8 * step + 4 + t];
        }
        q_scale[m][r] = params.q_scales[source];
        sum[m][r] = unsettled[m][r] = 0.0f;
        reference[m][r] = -FLOAT_MAX;
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
      }
    }
  }

  // s = Q K^T, beside MAGIC. `k` is the shared address of the tile plus this lane's offset.
  __device__ __forceinline__ void multiply_keys(u32 k) {
    u32 magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
    for (int pair = 0; pair < KEYS / 16; ++pair) {
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 32; ++step) {
        u32 b[4];
        ldmatrix_x4(b, k + pair / 4 * BLOCK + step * PANEL + pair % 4 * (16 * 32));
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          u32(&s0)[4] = s[m][2 * pair];
          u32(&s1)[4] = s[m][2 * pair + 1];
          mma_s8_s8(s0, q[m][step], b[0], b[1], step ? s0 : magic);
          mma_s8_s8(s1, q[m][step], b[2], b[3], step ? s1 : magic);
        }
      }
    }
  }

  // Factors of this tile; true if they are small enough for the fast path in every lane.
  __device__ __forceinline__ bool read_factors(u32 k_scales) {
    float largest = 0.0f;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float k_scale = load_shared_float(k_scales + (block * SCALES_PER_BLOCK + t) * 4);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          factor[m][r][block] = q_scale[m][r] * k_scale;
          largest = fmaxf(largest, factor[m][r][block]);
        }
      }
    }
    return !__any_sync(0xffffffff, largest > LARGEST_FAST_FACTOR);
  }

  // top = the largest exponent of each row, from scores as they come out of the product.
  __device__ __forceinline__ void find_top() {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float highest = -FLOAT_MAX;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          // Beside MAGIC all scores are positive floats, which compare like integers.
          s32 largest = 0;
#pragma unroll
          for (int n = block * 8; n < block * 8 + 8; ++n) {
            largest = max(largest, static_cast<s32>(s[m][n][2 * r]));
            largest = max(largest, static_cast<s32>(s[m][n][2 * r + 1]));
          }
          highest = max_nan(highest, (as_float(largest) - MAGIC) * factor[m][r][block]);
        }
        top[m][r] = over_quad(highest);
      }
    }
  }

  // Which keys of the tile a boolean mask shows, four to a word; false if it shows none to this warp.
  __device__ __forceinline__ bool read_visibility(const Params& params, int batch, int head,
                                                  int first_key,
                                                  u32 (&visible)[ROW_TILES][2][KEYS / 16]) const {
    u32 any = 0;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const s64 mask_row = params.mask.row(batch, head, min(row(m, r), params.q_len - 1));
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
          visible[m][r][j] =
              params.mask.visible(mask_row, first_key + 16 * j + 4 * t, params.kv_len);
          any |= visible[m][r][j];
        }
      }
    }
    return __any_sync(0xffffffff, any != 0);
  }

  // The exact path: scores to exponents, biased or hidden one by one; top as above. Hidden keys
  // get -infinity; a row that sees nothing gets a top of -FLOAT_MAX.
  __device__ __forceinline__ void hide_and_find_top(const Params& params, int batch, int head,
                                                    int first_key,
                                                    const u32 (&visible)[ROW_TILES][2][KEYS / 16]) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = row(m, r);
        const int last_key = params.causal ? min(query, params.kv_len - 1) : params.kv_len - 1;
        const s64 mask_row = MASKED ? params.mask.row(batch, head, min(query, params.q_len - 1)) : 0;
        float highest = -FLOAT_MAX;
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
          const int key = first_key + 16 * j + 4 * t;
          float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (MASKED && params.mask.dtype != BOOL) {
            params.mask.biases(bias, mask_row, key, params.kv_len);
          }
          const float scale = min_nan(factor[m][r][j / 4], LARGEST_FACTOR);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            u32& score = s[m][2 * j + i / 2][2 * r + i % 2];
            float exponent = fmaf(as_float(score) - MAGIC, scale, bias[i]);
            bool hidden = key + i > last_key;
            if (MASKED && params.mask.dtype == BOOL) {
              hidden = hidden || !(visible[m][r][j] & 0xffu << (8 * i));
            }
            score = hidden ? NEGATIVE_INFINITY_BITS : as_bits(exponent);
            highest = max_nan(highest, as_float(score));
          }
        }
        top[m][r] = over_quad(highest);
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
          for (int i = 2 * r; i < 2 * r + 2; ++i) {
            s[m][n][i] = as_bits(as_float(s[m][n][i]) - top[m][r]);
          }
        }
      }
    }
  }

  // p = round(255 * 2^(exponent - top)); adds to sum; prepares out for this tile's unit.
  // weight: the tile's unit in units of out.
  __device__ __forceinline__ void exponentiate(bool exact, float (&weight)[ROW_TILES][2]) {
    follow_top();
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u32 total = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          const float scale = exact ? 1.0f : factor[m][r][block];
          const float shift =
              exact ? LOG2_255 : fmaf(-MAGIC_WITH_MARGIN, scale, LOG2_255 - top[m][r]);
#pragma unroll
          for (int j = block * 4; j < block * 4 + 4; ++j) {
            const u32 word = quantise_four(s[m][2 * j][2 * r], s[m][2 * j][2 * r + 1],
                                           s[m][2 * j + 1][2 * r], s[m][2 * j + 1][2 * r + 1],
                                           scale, shift);
            total = add_bytes(word, total);
            p[m][j / 2][j % 2 * 2 + r] = word;
          }
        }
        weight[m][r] = exp2_approx(top[m][r] - reference[m][r]);
        sum[m][r] = fmaf(static_cast<float>(total), weight[m][r], sum[m][r]);
        unsettled[m][r] = fmaf(MAGIC, weight[m][r], unsettled[m][r]);
      }
    }
  }

  // out += weight * P V. `v` is the shared address of the tile plus this lane's offset.
  __device__ __forceinline__ void multiply_values(u32 v, const float (&weight)[ROW_TILES][2]) {
    u32 magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
    for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
      u32 product[ROW_TILES][2][4];
#pragma unroll
      for (int step = 0; step < KEYS / 32; ++step) {
        u32 b[4];
        ldmatrix_x4(b, v + step / 2 * BLOCK + step % 2 * V_PANEL + pair * (16 * 32));
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          u32(&left)[4] = product[m][0];
          u32(&right)[4] = product[m][1];
          mma_u8_s8(left, p[m][step], b[0], b[1], step ? left : magic);
          mma_u8_s8(right, p[m][step], b[2], b[3], step ? right : magic);
        }
      }
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& o = out[m][2 * pair + side][i];
            o = fmaf(as_float(product[m][side][i]), weight[m][i / 2], o);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] -= unsettled[m][i / 2];
      }
      unsettled[m][0] = unsettled[m][1] = 0.0f;
    }
  }

 private:
  // Moves the references of rows whose tops left them behind.
  __device__ __forceinline__ void follow_top() {
    bool behind = false;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      behind = behind || top[m][0] > reference[m][0] + REFERENCE_SLACK ||
               top[m][1] > reference[m][1] + REFERENCE_SLACK;
    }
    if (!__any_sync(0xffffffff, behind)) return;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      float shrink[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float moved = max_nan(reference[m][r], top[m][r]);
        shrink[r] = exp2_approx(reference[m][r] - moved);
        reference[m][r] = moved;
        sum[m][r] *= shrink[r];
        unsettled[m][r] *= shrink[r];
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] *= shrink[i / 2];
      }
    }
  }

  static __device__ __forceinline__ float over_quad(float x) {
    x = max_nan(x, __shfl_xor_sync(0xffffffff, x, 1));
    return max_nan(x, __shfl_xor_sync(0xffffffff, x, 2));
  }

  // round(2^(score * scale + shift)) of four scores, at most 255 each, packed. Rounding is an
  // addition of 1024 in FP16, whose last place is then 1.
  static __device__ __forceinline__ u32 quantise_four(u32 s0, u32 s1, u32 s2, u32 s3, float scale,
                                                      float shift) {
    u32 low = pack_f16x2(exp2_approx(fmaf(as_float(s0), scale, shift)),
                         exp2_approx(fmaf(as_float(s1), scale, shift)));
    u32 high = pack_f16x2(exp2_approx(fmaf(as_float(s2), scale, shift)),
                          exp2_approx(fmaf(as_float(s3), scale, shift)));
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(low) : "r"(0x64006400u));
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(high) : "r"(0x64006400u));
    return permute_bytes(low, high, 0x6420);
  }
};

// The tiles of K, V and scales of K under way or in use: STAGES of them in shared memory.
template <int HEAD_DIM, int KEYS, int STAGES>
struct Pipeline {
  static constexpr int CODES = KEYS * HEAD_DIM;  // bytes of a tile of K or of V
  static constexpr int SCALES = KEYS / BLOCK_KEYS * SCALES_PER_BLOCK * 4;
  static constexpr int STAGE = 2 * CODES + SCALES;
  static_assert(CODES % (THREADS * 16) == 0, "every thread copies the same number of vectors");

  u32 shared;
  const u8 *k, *v, *scales;
  int tiles;

  __device__ __forceinline__ void fetch(int tile) const {
    if (tile < tiles) {
      const u32 stage = stage_of(tile);
      const s64 offset = static_cast<s64>(tile) * CODES + threadIdx.x * 16;
      const u32 target = stage + threadIdx.x * 16;
#pragma unroll
      for (int byte = 0; byte < CODES; byte += THREADS * 16) {
        copy_16_bytes_async(target + byte, k + offset + byte);
        copy_16_bytes_async(target + CODES + byte, v + offset + byte);
      }
      if (threadIdx.x < SCALES / 16) {
        copy_16_bytes_async(stage + 2 * CODES + threadIdx.x * 16,
                            scales + static_cast<s64>(tile) * SCALES + threadIdx.x * 16);
      }
    }
    commit_copies();  // an empty group where there is no tile, so that the count stays right
  }

  __device__ __forceinline__ u32 stage_of(int tile) const { return shared + tile % STAGES * STAGE; }
};

template <int HEAD_DIM, int KEYS, int STAGES, int ROW_TILES, bool MASKED>
__device__ __forceinline__ void store(const Params& p,
                                      Warp<HEAD_DIM, KEYS, STAGES, ROW_TILES, MASKED>& w, int batch,
                                      int head, s64 head_row, const float* v_channels) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = w.sum[m][r];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const int row = w.row(m, r);
      if (row >= p.q_len) continue;
      const bool blind = sum == 0.0f;  // the row sees no key
      const float inverse = blind ? 0.0f : 1.0f / sum;
      if (p.lse != nullptr && w.t == 0) {
        p.lse[head_row + row] = (w.reference[m][r] + (log2_approx(sum) - LOG2_255)) * LN_2;
      }
      const s64 offset = batch * p.out_batch_stride + head * p.out_head_stride +
                         row * p.out_token_stride;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        const int channel = 8 * n + 2 * w.t;
        if (channel >= p.head_dim) continue;
        const float2 scale = *reinterpret_cast<const float2*>(v_channels + channel);
        const float2 mean = *reinterpret_cast<const float2*>(v_channels + HEAD_DIM + channel);
        float x = fmaf(w.out[m][n][2 * r] * inverse, scale.x, blind ? 0.0f : mean.x);
        float y = fmaf(w.out[m][n][2 * r + 1] * inverse, scale.y, blind ? 0.0f : mean.y);
        if (p.out_dtype == F32) {
          *reinterpret_cast<float2*>(static_cast<float*>(p.out) + offset + channel) =
              make_float2(x, y);
        } else {
          if (p.out_dtype == F16) {  // quantisation may carry a value past the largest input
            x = max_nan(min_nan(x, 65504.0f), -65504.0f);
            y = max_nan(min_nan(y, 65504.0f), -65504.0f);
          }
          *reinterpret_cast<u32*>(static_cast<u16*>(p.out) + offset + channel) =
              p.out_dtype == F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
        }
      }
    }
  }
}

template <int HEAD_DIM, int KEYS, int STAGES, int ROW_TILES, bool MASKED, int MIN_BLOCKS>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
sm80_int8_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  constexpr int WARP_ROWS = 16 * ROW_TILES, ROWS = THREADS / 32 * WARP_ROWS;
  const int head = blockIdx.y, batch = blockIdx.z;
  // Longest rows first, so that a causal call's last blocks are its short ones.
  const int row_block = p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int first_row = row_block * ROWS + threadIdx.x / 32 * WARP_ROWS;
  const int keys = p.causal ? min(p.kv_len, (row_block + 1) * ROWS) : p.kv_len;
  const s64 head_row = (static_cast<s64>(batch) * p.q_heads + head) * p.q_len;
  const s64 kv_head = static_cast<s64>(batch) * p.kv_heads + head / (p.q_heads / p.kv_heads);

  const Pipeline<HEAD_DIM, KEYS, STAGES> pipeline{
      shared_address_of(shared),
      p.k_codes + kv_head * p.blocks * (BLOCK_KEYS * HEAD_DIM),
      p.v_codes + kv_head * p.blocks * (BLOCK_KEYS * HEAD_DIM),
      reinterpret_cast<const u8*>(p.k_scales + kv_head * p.blocks * SCALES_PER_BLOCK),
      (keys + KEYS - 1) / KEYS};
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; ++tile) pipeline.fetch(tile);

  Warp<HEAD_DIM, KEYS, STAGES, ROW_TILES, MASKED> w;
  w.start(p, head_row, first_row);
  const int lane_offset = ldmatrix_offset(threadIdx.x % 32);

  for (int tile = 0; tile < pipeline.tiles; ++tile) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // the tile is there for all; the stage before it is no longer read
    pipeline.fetch(tile + STAGES - 1);

    const int first_key = tile * KEYS;
    if (p.causal && first_key >= first_row + WARP_ROWS) continue;
    u32 visible[ROW_TILES][2][KEYS / 16];
    if constexpr (MASKED) {
      if (p.mask.dtype == BOOL && !w.read_visibility(p, batch, head, first_key, visible)) continue;
    }

    const u32 stage = pipeline.stage_of(tile);
    w.multiply_keys(stage + lane_offset);
    const bool small_factors = w.read_factors(stage + 2 * pipeline.CODES);
    const bool exact = MASKED || !small_factors || first_key + KEYS > p.kv_len ||
                       (p.causal && first_key + KEYS - 1 > first_row);
    if (exact) {
      w.hide_and_find_top(p, batch, head, first_key, visible);
    } else {
      w.find_top();
    }
    float weight[ROW_TILES][2];
    w.exponentiate(exact, weight);
    w.multiply_values(stage + pipeline.CODES + lane_offset, weight);
    if (tile % TILES_PER_SETTLEMENT == TILES_PER_SETTLEMENT - 1) w.settle();
  }
  w.settle();
  store(p, w, batch, head, head_row, p.v_channels + kv_head * 2 * HEAD_DIM);
}

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

template <int HEAD_DIM, int KEYS, int ROW_TILES, bool MASKED>
struct Warp {
  using Scores = u32[ROW_TILES][KEYS / 8][4];  // integers beside MAGIC, or exponents of two

  static constexpr int BLOCKS = KEYS / BLOCK_KEYS;
  static constexpr int PANEL = BLOCK_KEYS * 32;     // bytes of 32 channels of a block of K
  static constexpr int V_PANEL = HEAD_DIM * 32;     // bytes of 32 keys of a block of V
  static constexpr int BLOCK = BLOCK_KEYS * HEAD_DIM;  // bytes of a block of K or of V
  static_assert(HEAD_DIM * 127 * 127 < MAGIC_RANGE, "scores must fit beside MAGIC");
  static_assert(KEYS * 255 * 127 < MAGIC_RANGE, "products P V must fit beside MAGIC");

  // Two row tiles leave no registers for Q; then ldmatrix fetches it anew for every tile of keys.
  static constexpr bool Q_IN_SHARED = ROW_TILES > 1;
  static constexpr int Q_BYTES = Q_IN_SHARED ? 16 * ROW_TILES * HEAD_DIM : 0;

  u32 q[Q_IN_SHARED ? 1 : ROW_TILES][HEAD_DIM / 32][4];
  u32 q_shared;  // address of the warp's Q in shared memory plus this lane's offset
  float q_scale[ROW_TILES][2];
  float out[ROW_TILES][HEAD_DIM / 8][4];
  float sum[ROW_TILES][2];        // this lane's part of the row's sum of P
  float reference[ROW_TILES][2];  // exponent of the unit of `out`, `sum` and `unsettled`
  float unsettled[ROW_TILES][2];  // what MAGIC added to `out`

  u32 p[ROW_TILES][KEYS / 32][4];
  float factor[ROW_TILES][2][BLOCKS];  // from scores to exponents
  float top[ROW_TILES][2];             // the tile's largest exponent per row

  int first_row, g, t;

  __device__ __forceinline__ int row(int m, int r) const { return first_row + 16 * m + 8 * r + g; }

  // `shared`: address of Q_BYTES for this warp; the caller waits for the copies begun here.
  __device__ __forceinline__ void start(const Params& params, s64 head_row, int row0, u32 shared) {
    const int lane = threadIdx.x % 32;
    first_row = row0, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const s64 source = head_row + min(row(m, r), params.q_len - 1);
        if constexpr (!Q_IN_SHARED) {
          const u32* words = reinterpret_cast<const u32*>(params.q_codes + source * HEAD_DIM);
#pragma unroll
          for (int step = 0; step < HEAD_DIM / 32; ++step) {
            q[m][step][r] = words[8 * step + t];
            q[m][step][r + 2] = words[8 * step + 4 + t];
          }
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
    if constexpr (Q_IN_SHARED) {
      // Panels of 32 channels, as those of K.
      for (int chunk = lane; chunk < Q_BYTES / 16; chunk += 32) {
        const int in_row = chunk / 2 % (16 * ROW_TILES), step = chunk / 2 / (16 * ROW_TILES);
        const s64 source = head_row + min(first_row + in_row, params.q_len - 1);
        copy_16_bytes_async(shared + step * (16 * ROW_TILES * 32) +
                                panel_offset(in_row, chunk % 2 * 16),
                            params.q_codes + source * HEAD_DIM + step * 32 + chunk % 2 * 16);
      }
      q_shared = shared + panel_offset(lane % 16, lane / 16 * 16);
    }
  }

  // s = Q K^T, beside MAGIC. `k` is the shared address of the tile plus this lane's offset.
  __device__ __forceinline__ void multiply_keys(Scores& s, u32 k) const {
    u32 magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 32; ++step) {
      u32 a[ROW_TILES][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
        if constexpr (Q_IN_SHARED) {
          ldmatrix_x4(a[m], q_shared + step * (16 * ROW_TILES * 32) + m * (16 * 32));
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = q[m][step][i];
        }
      }
#pragma unroll
      for (int pair = 0; pair < KEYS / 16; ++pair) {
        u32 b[4];
        ldmatrix_x4(b, k + pair / 4 * BLOCK + step * PANEL + pair % 4 * (16 * 32));
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
          u32(&s0)[4] = s[m][2 * pair];
          u32(&s1)[4] = s[m][2 * pair + 1];
          mma_s8_s8(s0, a[m], b[0], b[1], step ? s0 : magic);
          mma_s8_s8(s1, a[m], b[2], b[3], step ? s1 : magic);
        }
      }
    }
  }

  __device__ __forceinline__ void read_factors(u32 k_scales) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float k_scale = load_shared_float(k_scales + (block * SCALES_PER_BLOCK + t) * 4);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          factor[m][r][block] = q_scale[m][r] * k_scale;
        }
      }
    }
  }

  // top = the largest exponent of each row, from scores as they come out of the product.
  __device__ __forceinline__ void find_top(const Scores& s) {
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
  __device__ __forceinline__ void hide_and_find_top(Scores& s, const Params& params, int batch,
                                                    int head, int first_key,
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

  // p = round(255 * 2^(exponent - top)); adds to sum.
  // weight: the tile's unit in units of out.
  template <bool EXACT>
  __device__ __forceinline__ void exponentiate(const Scores& s, float (&weight)[ROW_TILES][2]) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u32 total = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          const float scale = EXACT ? 1.0f : factor[m][r][block];
          const float shift =
              EXACT ? LOG2_255 : fmaf(-MAGIC_WITH_MARGIN, scale, LOG2_255 - top[m][r]);
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

// Two slots for tiles of K and two for tiles of V with the scales of K. K may run a tile ahead.
template <int HEAD_DIM, int KEYS, int THREADS>
struct Slots {
  static constexpr int CODES = KEYS * HEAD_DIM;  // bytes of a tile of K or of V
  static constexpr int SCALES = KEYS / BLOCK_KEYS * SCALES_PER_BLOCK * 4;
  static constexpr int BYTES = 4 * CODES + 2 * SCALES;

  u32 shared;
  const u8 *k, *v, *scales;
  int tiles;

  __device__ __forceinline__ u32 k_slot(int tile) const { return shared + tile % 2 * CODES; }
  __device__ __forceinline__ u32 v_slot(int tile) const { return shared + (2 + tile % 2) * CODES; }
  __device__ __forceinline__ u32 scales_slot(int tile) const {
    return shared + 4 * CODES + tile % 2 * SCALES;
  }

  __device__ __forceinline__ void fetch_k(int tile) const {
    if (tile < tiles) fetch(k_slot(tile), k, tile);
  }

  __device__ __forceinline__ void fetch_v(int tile) const {
    if (tile >= tiles) return;
    fetch(v_slot(tile), v, tile);
    if (threadIdx.x < SCALES / 16) {
      copy_16_bytes_async(scales_slot(tile) + threadIdx.x * 16,
                          scales + static_cast<s64>(tile) * SCALES + threadIdx.x * 16);
    }
  }

 private:
  static __device__ __forceinline__ void fetch(u32 slot, const u8* codes, int tile) {
    const u8* source = codes + static_cast<s64>(tile) * CODES + threadIdx.x * 16;
#pragma unroll
    for (int byte = 0; byte < CODES; byte += THREADS * 16) {
      if (byte + THREADS * 16 <= CODES || threadIdx.x * 16 + byte < CODES) {
        copy_16_bytes_async(slot + threadIdx.x * 16 + byte, source + byte);
      }
    }
  }
};

// True if the factors of all keys and of this thread's rows are small enough for the fast path.
template <int ROW_TILES>
__device__ __forceinline__ bool has_small_factors(const float (&q_scale)[ROW_TILES][2],
                                                  const float* k_scales, int blocks, int threads) {
  float largest_q = 0.0f, largest_k = 0.0f;
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    largest_q = fmaxf(largest_q, fmaxf(q_scale[m][0], q_scale[m][1]));
  }
  for (int block = threadIdx.x; block < blocks; block += threads) {
    const float4 k = reinterpret_cast<const float4*>(k_scales)[block];
    largest_k = fmaxf(largest_k, fmaxf(fmaxf(k.x, k.y), fmaxf(k.z, k.w)));
  }
  const float limit = 0.088388347f;  // its square is LARGEST_FAST_FACTOR
  return !__syncthreads_or(largest_q > limit || largest_k > limit);
}

// O = out / sum in V's units, with V's mean back; a row that saw no key gives zeros.
template <Dtype DTYPE, int HEAD_DIM, int KEYS, int ROW_TILES, bool MASKED>
__device__ __forceinline__ void store(const Params& p,
                                      const Warp<HEAD_DIM, KEYS, ROW_TILES, MASKED>& w, int batch,
                                      int head, const float (&inverse)[ROW_TILES][2],
                                      const float* v_channels) {
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; ++n) {
    const int channel = 8 * n + 2 * w.t;
    const float2 scale = *reinterpret_cast<const float2*>(v_channels + channel);
    const float2 mean = *reinterpret_cast<const float2*>(v_channels + HEAD_DIM + channel);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool blind = inverse[m][r] == 0.0f;
        float x = fmaf(w.out[m][n][2 * r] * inverse[m][r], scale.x, blind ? 0.0f : mean.x);
        float y = fmaf(w.out[m][n][2 * r + 1] * inverse[m][r], scale.y, blind ? 0.0f : mean.y);
        const s64 element = batch * p.out_batch_stride + head * p.out_head_stride +
                            w.row(m, r) * p.out_token_stride + channel;
        const bool exists = w.row(m, r) < p.q_len && channel < p.head_dim;
        if constexpr (DTYPE == F32) {
          float2* target = reinterpret_cast<float2*>(static_cast<float*>(p.out) + element);
          if (exists) *target = make_float2(x, y);
        } else {
          if constexpr (DTYPE == F16) {  // quantisation may carry a value past the largest input
            x = max_nan(min_nan(x, 65504.0f), -65504.0f);
            y = max_nan(min_nan(y, 65504.0f), -65504.0f);
          }
          u32* target = reinterpret_cast<u32*>(static_cast<u16*>(p.out) + element);
          if (exists) *target = DTYPE == F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
        }
      }
    }
  }
}

template <int HEAD_DIM, int KEYS, int ROW_TILES, bool MASKED>
__device__ __forceinline__ void finish(const Params& p,
                                       const Warp<HEAD_DIM, KEYS, ROW_TILES, MASKED>& w, int batch,
                                       int head, s64 head_row, const float* v_channels) {
  float inverse[ROW_TILES][2];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = w.sum[m][r];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      inverse[m][r] = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (p.lse != nullptr && w.t == 0 && w.row(m, r) < p.q_len) {
        p.lse[head_row + w.row(m, r)] =
            (w.reference[m][r] + (log2_approx(sum) - LOG2_255)) * LN_2;
      }
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

template <int HEAD_DIM, int KEYS, int WARPS, int ROW_TILES, bool AHEAD, bool MASKED, int MIN_BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
sm80_int8_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 shared[];
  constexpr int WARP_ROWS = 16 * ROW_TILES, ROWS = WARPS * WARP_ROWS, THREADS = 32 * WARPS;
  const int head = blockIdx.y, batch = blockIdx.z;
  // Longest rows first, so that a causal call's last blocks are its short ones.
  const int row_block = p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int first_row = row_block * ROWS + threadIdx.x / 32 * WARP_ROWS;
  const int keys = p.causal ? min(p.kv_len, (row_block + 1) * ROWS) : p.kv_len;
  const s64 head_row = (static_cast<s64>(batch) * p.q_heads + head) * p.q_len;
  const s64 kv_head = static_cast<s64>(batch) * p.kv_heads + head / (p.q_heads / p.kv_heads);
  const float* k_scales = p.k_scales + kv_head * p.blocks * SCALES_PER_BLOCK;

  const Slots<HEAD_DIM, KEYS, THREADS> slots{
      shared_address_of(shared), p.k_codes + kv_head * p.blocks * (BLOCK_KEYS * HEAD_DIM),
      p.v_codes + kv_head * p.blocks * (BLOCK_KEYS * HEAD_DIM),
      reinterpret_cast<const u8*>(k_scales), (keys + KEYS - 1) / KEYS};
  slots.fetch_k(0);
  slots.fetch_v(0);
  if (AHEAD && !MASKED) slots.fetch_k(1);

  using W = Warp<HEAD_DIM, KEYS, ROW_TILES, MASKED>;
  W w;
  w.start(p, head_row, first_row,
          slots.shared + slots.BYTES + threadIdx.x / 32 * W::Q_BYTES);
  commit_copies();
  const int lane_offset = ldmatrix_offset(threadIdx.x % 32);
  int tile = 0;

  if constexpr (!MASKED) {
    // Tiles that every row of the block sees whole.
    int whole = (p.causal ? min(p.kv_len, row_block * ROWS + 1) : p.kv_len) / KEYS;
    if (!has_small_factors(w.q_scale, k_scales, (keys + BLOCK_KEYS - 1) / BLOCK_KEYS, THREADS)) {
      whole = 0;
    }
    typename W::Scores even, odd;
    if (AHEAD) {
      wait_for_copies<0>();
      __syncthreads();
      w.multiply_keys(even, slots.k_slot(0) + lane_offset);
    }
    auto step = [&](typename W::Scores& s, typename W::Scores& next) {
      wait_for_copies<0>();
      __syncthreads();  // the tiles fetched last are there; those before are no longer read
      slots.fetch_k(AHEAD ? tile + 2 : tile + 1);
      slots.fetch_v(tile + 1);
      commit_copies();
      if (!AHEAD) w.multiply_keys(s, slots.k_slot(tile) + lane_offset);
      w.read_factors(slots.scales_slot(tile));
      w.find_top(s);
      w.follow_top();
      // The next scores are begun here, in one stretch of code with the exponentials, so that the
      // tensor cores have work meanwhile. After the last tile they are computed from a stale one.
      if (AHEAD) w.multiply_keys(next, slots.k_slot(tile + 1) + lane_offset);
      float weight[ROW_TILES][2];
      w.template exponentiate<false>(s, weight);
      w.multiply_values(slots.v_slot(tile) + lane_offset, weight);
      ++tile;
      if (tile % TILES_PER_SETTLEMENT == 0) w.settle();
    };
    while (tile < whole) {
      step(even, odd);
      if (AHEAD) {
        if (tile == whole) break;
        step(odd, even);
      }
    }
    if (tile < slots.tiles && tile > 0) {  // begin again for the rest
      wait_for_copies<0>();
      __syncthreads();
      slots.fetch_k(tile);
      slots.fetch_v(tile);
      commit_copies();
    }
  }

  for (; tile < slots.tiles; ++tile) {
    wait_for_copies<0>();
    __syncthreads();
    slots.fetch_k(tile + 1);
    slots.fetch_v(tile + 1);
    commit_copies();
    const int first_key = tile * KEYS;
    if (p.causal && first_key >= first_row + WARP_ROWS) continue;
    u32 visible[ROW_TILES][2][KEYS / 16];
    if constexpr (MASKED) {
      if (p.mask.dtype == BOOL && !w.read_visibility(p, batch, head, first_key, visible)) continue;
    }
    typename W::Scores s;
    w.multiply_keys(s, slots.k_slot(tile) + lane_offset);
    w.read_factors(slots.scales_slot(tile));
    w.hide_and_find_top(s, p, batch, head, first_key, visible);
    w.follow_top();
    float weight[ROW_TILES][2];
    w.template exponentiate<true>(s, weight);
    w.multiply_values(slots.v_slot(tile) + lane_offset, weight);
    if (tile % TILES_PER_SETTLEMENT == TILES_PER_SETTLEMENT - 1) w.settle();
  }
  w.settle();
  finish(p, w, batch, head, head_row, p.v_channels + kv_head * 2 * HEAD_DIM);
}

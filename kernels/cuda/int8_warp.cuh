// Sixteen rows of Q against one tile of keys after the other: what a warp of INT8 attention does.
//
// S = Q K^T in s8 x s8, from the bits of MAGIC; P as in int8_probabilities.cuh; P V in u8 x u8.
//
// On an H200 an IMMA takes its scheduler six cycles, however many warps there are, and with four
// FFMA or HADD2 beside it, ten. No unit is full, though: two warps per scheduler, which is what the
// registers leave room for, do not cover each other's waits (docs/kernel-notes-int8.md).
#pragma once

#include "int8_probabilities.cuh"
#include "mask.cuh"

constexpr int WARP_ROWS = 16;

template <int HEAD_DIM, int KEYS>
struct Warp {
  using Scores = u32[KEYS / 8][4];  // integers beside MAGIC, or exponents of two

  static constexpr int STEPS = HEAD_DIM / 32;    // of a product Q K^T
  static constexpr int PAIRS = KEYS / 16;        // of its n-tiles: a pair is 16 keys
  static constexpr int V_PAIRS = HEAD_DIM / 16;  // of n-tiles of P V
  static constexpr int BLOCKS = KEYS / BLOCK_KEYS;
  static constexpr int BLOCK = BLOCK_KEYS * HEAD_DIM;  // bytes of a block of K or of V
  static constexpr int PANEL = BLOCK_KEYS * 32;        // bytes of 32 channels of a block of K
  static constexpr int V_PANEL = HEAD_DIM * 32;        // bytes of 32 keys of a block of V
  static_assert(HEAD_DIM * 127 * 127 < MAGIC_RANGE, "scores must fit beside MAGIC");
  static_assert(KEYS * 255 * 255 < DENORMAL_RANGE, "products P V must be denormal");

  u32 q[STEPS][4];
  float q_scale[2];
  float out[HEAD_DIM / 8][4];
  float sum[2];        // this lane's part of the row's sum of P
  float reference[2];  // what `out` and `sum` are measured by
  int first_row;

  // Of the tile at hand.
  float factor[2][BLOCKS];  // from scores to exponents
  float top[2];             // the largest exponent of each row
  u32 p[KEYS / 32][4];

  __device__ __forceinline__ int row(int r) const {
    return first_row + 8 * r + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }  // lane in its quad

  // `codes` and `scales`: of the head's first query.
  __device__ __forceinline__ void start(const u8* codes, const float* scales, int row0, int q_len) {
    first_row = row0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int source = min(row(r), q_len - 1);
      const u32* words = reinterpret_cast<const u32*>(codes + static_cast<s64>(source) * HEAD_DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        q[step][r] = words[8 * step + t()];
        q[step][r + 2] = words[8 * step + 4 + t()];
      }
      q_scale[r] = scales[source];
      sum[r] = 0.0f;
      reference[r] = -FLOAT_MAX;
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    }
  }

  // s = Q K^T, beside MAGIC. `k` is the shared address of the tile plus this lane's offset.
  __device__ __forceinline__ void multiply_keys(Scores& s, u32 k) const {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) multiply_keys(s, k, step, pair);
    }
  }

  // factor, and top = the largest exponent of each row, from scores as the product leaves them.
  __device__ __forceinline__ void find_top(const Scores& s, const float (&k_scale)[BLOCKS]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float highest = -FLOAT_MAX;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        // Beside MAGIC all scores are positive floats, which compare like integers.
        s32 largest = 0;
#pragma unroll
        for (int n = block * 8; n < block * 8 + 8; ++n) {
          largest = max(largest, static_cast<s32>(s[n][2 * r]));
          largest = max(largest, static_cast<s32>(s[n][2 * r + 1]));
        }
        factor[r][block] = q_scale[r] * k_scale[block];
        highest = max_nan(highest, (as_float(largest) - MAGIC) * factor[r][block]);
      }
      top[r] = over_quad(highest);
    }
  }

  // Which keys of the tile a boolean mask shows, four to a word; false if none to this warp.
  __device__ __forceinline__ bool read_visibility(const Mask& mask, int batch, int head, int q_len,
                                                  int kv_len, int first_key,
                                                  u32 (&visible)[2][PAIRS]) const {
    u32 any = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const s64 mask_row = mask.row(batch, head, min(row(r), q_len - 1));
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        visible[r][j] = mask.visible(mask_row, first_key + 16 * j + 4 * t(), kv_len);
        any |= visible[r][j];
      }
    }
    return __any_sync(0xffffffff, any != 0);
  }

  // The exact path: scores to exponents, biased or hidden one by one; top as above. Hidden keys
  // get -infinity; a row that sees nothing gets a top of -FLOAT_MAX.
  template <bool MASKED>
  __device__ __forceinline__ void hide_and_find_top(Scores& s, const float (&k_scale)[BLOCKS],
                                                    const Mask& mask,
                                                    int batch, int head, int q_len, int kv_len,
                                                    bool causal, int first_key,
                                                    const u32 (&visible)[2][PAIRS]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row(r);
      const int last_key = causal ? min(query, kv_len - 1) : kv_len - 1;
      const s64 mask_row = MASKED ? mask.row(batch, head, min(query, q_len - 1)) : 0;
      float highest = -FLOAT_MAX;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const int key = first_key + 16 * j + 4 * t();
        float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (MASKED && mask.dtype != BOOL) mask.biases(bias, mask_row, key, kv_len);
        const float scale = min_nan(q_scale[r] * k_scale[j / 4], LARGEST_FACTOR);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32& score = s[2 * j + i / 2][2 * r + i % 2];
          const float exponent = fmaf(as_float(score) - MAGIC, scale, bias[i]);
          bool hidden = key + i > last_key;
          if (MASKED && mask.dtype == BOOL) {
            hidden = hidden || !(visible[r][j] & 0xffu << (8 * i));
          }
          score = hidden ? NEGATIVE_INFINITY_BITS : as_bits(exponent);
          highest = max_nan(highest, as_float(score));
        }
      }
      top[r] = over_quad(highest);
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) s[n][i] = as_bits(as_float(s[n][i]) - top[r]);
      }
    }
  }

  // Moves the references of rows whose tops left them behind.
  __device__ __forceinline__ void follow_top() {
    float shrink[2];
    if (!follow_tops(top, reference, sum, shrink)) return;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= shrink[i / 2];
    }
  }

  // The fast path takes a tile in two stretches of code without branches: P beside the next tile's
  // scores, then P V beside the next tile's maximum. The compiler mixes what stands in a stretch;
  // in a single one, it puts the next scores off until after P V, and nothing overlaps.
  //
  // First stretch. `k`: shared address of the next tile of K plus this lane's offset; `fetch` is
  // called in the middle, where its copies are in nobody's way.
  template <typename Fetch>
  __device__ __forceinline__ void find_p(const Scores& s, Scores& next, u32 k, Fetch fetch) {
    float shift[2][BLOCKS];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        shift[r][block] = fmaf(-MAGIC_WITH_MARGIN, factor[r][block], LOG2_255 - top[r]);
      }
    }
    // 32 keys at a time, so that scores of the next tile take the registers that P has left.
    constexpr int SLOTS = PAIRS / 2 * STEPS, GROUPS = 2 * PAIRS;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int pair = slot / STEPS * 2, step = slot % STEPS;
      multiply_keys(next, k, step, pair);
      multiply_keys(next, k, step, pair + 1);
#pragma unroll
      for (int group = GROUPS * slot / SLOTS; group < GROUPS * (slot + 1) / SLOTS; ++group) {
        exponentiate(s, group, factor, shift);
      }
      if (slot == SLOTS / 2) fetch();
    }
  }

  // Second stretch. `v`: shared address of this tile of V plus this lane's offset.
  __device__ __forceinline__ void add_values(u32 v, const Scores& next,
                                             const float (&next_k_scale)[BLOCKS]) {
    float weight[2];
    add_sum(weight);
#pragma unroll
    for (int pair = 0; pair < V_PAIRS; pair += 2) {
      multiply_values(v, pair, weight);
      if (pair == 2) find_top(next, next_k_scale);
    }
  }

  // A tile of the exact path: its P, and P V.
  __device__ __forceinline__ void add_exact(const Scores& exponents, u32 v) {
    float one[2][BLOCKS], shift[2][BLOCKS];
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
      one[i / BLOCKS][i % BLOCKS] = 1.0f, shift[i / BLOCKS][i % BLOCKS] = LOG2_255;
    }
#pragma unroll
    for (int group = 0; group < 2 * PAIRS; ++group) exponentiate(exponents, group, one, shift);
    float weight[2];
    add_sum(weight);
#pragma unroll
    for (int pair = 0; pair < V_PAIRS; pair += 2) multiply_values(v, pair, weight);
  }

 private:
  // One step of Q K^T for the 16 keys of a pair of n-tiles.
  __device__ __forceinline__ void multiply_keys(Scores& s, u32 k, int step, int pair) const {
    u32 magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
    u32 b[4];
    ldmatrix_x4(b, k + pair / 4 * BLOCK + step * PANEL + pair % 4 * (16 * 32));
    mma_s8_s8(s[2 * pair], q[step], b[0], b[1], step ? s[2 * pair] : magic);
    mma_s8_s8(s[2 * pair + 1], q[step], b[2], b[3], step ? s[2 * pair + 1] : magic);
  }

  // p = round(2^(s * scale + shift)) of a pair of n-tiles in one of the two rows.
  __device__ __forceinline__ void exponentiate(const Scores& s, int group,
                                               const float (&scale)[2][BLOCKS],
                                               const float (&shift)[2][BLOCKS]) {
    const int pair = group / 2, r = group % 2, block = pair / 4;
    p[pair / 2][pair % 2 * 2 + r] =
        quantise_four(s[2 * pair][2 * r], s[2 * pair][2 * r + 1], s[2 * pair + 1][2 * r],
                      s[2 * pair + 1][2 * r + 1], scale[r][block], shift[r][block]);
  }

  // weight: the tile's unit in units of out.
  __device__ __forceinline__ void add_sum(float (&weight)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 total = 0;
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        total = add_bytes(p[pair / 2][pair % 2 * 2 + r], total);
      }
      weight[r] = weight_of(top[r], reference[r]);
      sum[r] = fmaf(as_float(total), weight[r], sum[r]);
    }
  }

  // out += weight * P V for 32 channels: two pairs of n-tiles, so that four products are under way
  // where each waits for the one before it.
  __device__ __forceinline__ void multiply_values(u32 v, int first_pair, const float (&weight)[2]) {
    u32 none[4] = {0, 0, 0, 0};
    u32 product[4][4];
#pragma unroll
    for (int step = 0; step < KEYS / 32; ++step) {
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        u32 b[4];
        const int pair = first_pair + n / 2;
        ldmatrix_x4(b, v + step / 2 * BLOCK + step % 2 * V_PANEL + pair * (16 * 32));
        mma_u8_u8(product[n], p[step], b[0], b[1], step ? product[n] : none);
        mma_u8_u8(product[n + 1], p[step], b[2], b[3], step ? product[n + 1] : none);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& o = out[2 * first_pair + i / 4][i % 4];
      o = fmaf(as_float(product[i / 4][i % 4]), weight[i % 4 / 2], o);
    }
  }

  static __device__ __forceinline__ float over_quad(float x) {
    x = max_nan(x, __shfl_xor_sync(0xffffffff, x, 1));
    return max_nan(x, __shfl_xor_sync(0xffffffff, x, 2));
  }

  // round(2^(score * scale + shift)) of four scores, at most 255 each, packed.
  static __device__ __forceinline__ u32 quantise_four(u32 s0, u32 s1, u32 s2, u32 s3, float scale,
                                                      float shift) {
    return round_to_bytes(exp2_approx(fmaf(as_float(s0), scale, shift)),
                          exp2_approx(fmaf(as_float(s1), scale, shift)),
                          exp2_approx(fmaf(as_float(s2), scale, shift)),
                          exp2_approx(fmaf(as_float(s3), scale, shift)));
  }
};

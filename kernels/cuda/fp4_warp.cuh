// Sixteen rows of Q against one block of 64 keys after the other: what a warp of FP4 attention does.
//
// P V is a block-scaled FP4 product; S = Q K^T is one or an INT8 product, see Scores. A row's P is kept in units of 2^reference, times
// NVFP4_MAX / 4 so that its block scales use all of E4M3 (SageAttention3, section 3.2); both factors
// are constants in the exponent. So is P's division by its block scale, the rounded one: no
// reciprocal, no multiplication. The two powers of two left free let the reference lag behind the
// row's maximum, so that few blocks rescale the accumulator.
//
// The denominator is a column of ones beside V: the tensor cores add up P as it was quantised.
//
// What counts is issue slots: 16 rows x 128 keys x 128 channels keep the tensor cores busy for 1024
// cycles, and three warps share a scheduler. docs/fp4.md has the count.
#pragma once

#include "fp4_scores.cuh"
#include "mask.cuh"

constexpr float REFERENCE_SLACK = 2.0f;      // powers of two
constexpr float LOG2_P_UNIT = 9.392317423f;  // log2(NVFP4_MAX) - REFERENCE_SLACK
constexpr float LOG2_E2M1_MAX = 2.584962501f;
constexpr u32 ONES = 0x22222222u, ONE_SCALES = 0x38383838u;

// Scores: Fp4Scores or Int8Scores.
template <typename Fp4, typename Scores, bool MASKED>
struct Warp {
  using Block = typename Scores::Block;
  static constexpr int OUT_TILES = Scores::HEAD_DIM / 8;

  Scores scores;
  float out[OUT_TILES][4];
  float sum[4];        // of row g in [0], of row g + 8 in [2]
  float reference[2];  // exponents
  int first_row;

  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }  // lane in its quad
  static __device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
  __device__ __forceinline__ int row(int r) const { return first_row + 8 * r + g(); }

  // Rows row0 .. row0 + 15 of a head; those past the end repeat the last one. `head_row`: the head's
  // first query, q_block: the rows' block of queries; all counted through all batches.
  template <typename Params>
  __device__ __forceinline__ void start(const Params& p, s64 kv_head, s64 q_block, s64 head_row,
                                        int row0) {
    first_row = row0;
    scores.start(p, kv_head, q_block,
                 {head_row + min(row(0), p.q_len - 1), head_row + min(row(1), p.q_len - 1)});
    reference[0] = reference[1] = -FLOAT_MAX;
#pragma unroll
    for (int n = 0; n < OUT_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
  }

  // The block of keys first_key .. first_key + 63. `block` and `delta`: shared addresses of the
  // block and of its smoothed-away scores; last_key: the last one of all, per row; `edge`: some row
  // does not see all of these keys.
  __device__ __forceinline__ void add_block(u32 block, u32 delta, const Mask& mask, int batch,
                                            int head, int q_len, int kv_len, int first_key,
                                            const int (&last_key)[2], bool edge) {
    u32 visible[2][KEY_TILES / 2];
    if constexpr (MASKED) {
      if (!read_visibility(mask, batch, head, q_len, kv_len, first_key, visible)) return;
    }
    float s[KEY_TILES][4];
    scores.multiply(s, block, delta);
    if constexpr (MASKED) {
      apply_mask(s, mask, batch, head, q_len, kv_len, first_key, last_key, visible);
    } else if (edge) {
      hide(s, first_key, last_key);
    }
    float top[2][2];
    find_tops(s, top);
    follow_tops(top);
    u32 p[4], p_scales;
    quantise(s, top, p, p_scales);
    multiply_values(block, p, p_scales);
  }

 private:
  static constexpr u32 ALL = 0xffffffff;

  // -infinity for keys past a row's last one.
  __device__ __forceinline__ void hide(float (&s)[KEY_TILES][4], int first_key,
                                       const int (&last_key)[2]) const {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first_key + key_of(n, i % 2) > last_key[i / 2]) {
          s[n][i] = as_float(NEGATIVE_INFINITY_BITS);
        }
      }
    }
  }

  // Which keys of the block a boolean mask shows, four to a word; false if none to this warp.
  __device__ __forceinline__ bool read_visibility(const Mask& mask, int batch, int head, int q_len,
                                                  int kv_len, int first_key,
                                                  u32 (&visible)[2][KEY_TILES / 2]) const {
    if (mask.dtype != BOOL) return true;
    u32 any = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const s64 mask_row = mask.row(batch, head, min(row(r), q_len - 1));
#pragma unroll
      for (int n = 0; n < KEY_TILES; n += 2) {
        visible[r][n / 2] = mask.visible(mask_row, first_key + key_of(n, 0), kv_len);
        any |= visible[r][n / 2];
      }
    }
    return __any_sync(ALL, any != 0);
  }

  // Scores to exponents, biased or hidden one by one.
  __device__ __forceinline__ void apply_mask(float (&s)[KEY_TILES][4], const Mask& mask, int batch,
                                             int head, int q_len, int kv_len, int first_key,
                                             const int (&last_key)[2],
                                             const u32 (&visible)[2][KEY_TILES / 2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const s64 mask_row = mask.row(batch, head, min(row(r), q_len - 1));
#pragma unroll
      for (int n = 0; n < KEY_TILES; n += 2) {
        const int key = first_key + key_of(n, 0);
        float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (mask.dtype != BOOL) mask.biases(bias, mask_row, key, kv_len);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = s[n + i / 2][2 * r + i % 2];
          bool hidden = key + i > last_key[r];
          if (mask.dtype == BOOL) hidden = hidden || !(visible[r][n / 2] & 0xffu << (8 * i));
          const float exponent = scores.exponent(score, r, bias[i]);
          score = hidden ? as_float(NEGATIVE_INFINITY_BITS) : exponent;
        }
      }
    }
  }

  // top[i][r]: the largest exponent of row r among the 16 keys of a scale. A lane's eight keys of
  // group i share theirs with its neighbour's.
  __device__ __forceinline__ void find_tops(const float (&s)[KEY_TILES][4], float (&top)[2][2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float highest = fmaxf(s[4 * i][2 * r], s[4 * i][2 * r + 1]);
#pragma unroll
        for (int n = 4 * i + 1; n < 4 * i + 4; ++n) {
          highest = fmaxf(highest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        }
        if constexpr (!MASKED) highest = scores.exponent(highest, r, 0.0f);
        top[i][r] = fmaxf(highest, __shfl_xor_sync(ALL, highest, 1));
      }
    }
  }

  // Moves the references of rows whose tops left them behind; rarely taken.
  __device__ __forceinline__ void follow_tops(const float (&top)[2][2]) {
    float highest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) highest[r] = fmaxf(top[0][r], top[1][r]);
    // Differences, which are exact where they are small: a sum of 10^8 and the slack would be rounded.
    const bool behind = (highest[0] - reference[0] > REFERENCE_SLACK) |
                        (highest[1] - reference[1] > REFERENCE_SLACK);
    if (!__any_sync(ALL, behind)) return;
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = fmaxf(highest[r], __shfl_xor_sync(ALL, highest[r], 2));
      const float moved = fmaxf(reference[r], highest[r]);
      shrink[r] = exp2_approx(reference[r] - moved);
      reference[r] = moved;
    }
#pragma unroll
    for (int n = 0; n < OUT_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= shrink[i / 2];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] *= shrink[i / 2];
  }

  // P and its scales as the product with V takes them.
  __device__ __forceinline__ void quantise(const float (&s)[KEY_TILES][4], const float (&top)[2][2],
                                           u32 (&p)[4], u32& p_scales) const {
    float scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float shift = LOG2_P_UNIT - LOG2_E2M1_MAX - reference[i % 2];
      scale[i] = fmaxf(exp2_approx(top[i / 2][i % 2] + shift), SMALLEST_E4M3);
    }
    const u32 codes = pack_e4m3(scale[0], scale[1], scale[2], scale[3]);
    unpack_e4m3(scale, codes);
    // Lanes 0, 1 hold the scales of the first 16 keys of each 32, lanes 2, 3 those of the others;
    // the product reads all four of row g from lane 0, of row g + 8 from lane 1.
    const u32 others = __shfl_xor_sync(ALL, codes, 2);
    p_scales = permute_bytes(codes, others, t() & 1 ? 0x7351 : 0x6240);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float shift = LOG2_P_UNIT - reference[i % 2] - log2_approx(scale[i]);
      if constexpr (!MASKED) shift = scores.shift(shift, i % 2);
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float score = s[i / 2 * 4 + k / 2][i % 2 * 2 + k % 2];
        x[k] = exp2_approx(MASKED ? score + shift : scores.shifted(score, i % 2, shift));
      }
      p[i] = Fp4::pack_e2m1(x);
    }
  }

  // out += P V, sum += P 1.
  __device__ __forceinline__ void multiply_values(u32 block, const u32 (&p)[4], u32 p_scales) {
    const u32 codes = block + Block::V_CODES + ldmatrix_offset(threadIdx.x % 32);
    const u32 scales = block + Block::V_SCALES + (8 * t() + g()) * 4;
#pragma unroll
    for (int group = 0; group < OUT_TILES / 4; ++group) {
      const u32 v_scales = load_shared_word(scales + group * (32 * 4));
#pragma unroll
      for (int n = 4 * group; n < 4 * group + 4; n += 2) {
        u32 b[4];
        ldmatrix_x4(b, codes + n * (8 * 32));
        multiply_fp4<Fp4>(n, out[n], p, b[0], b[1], p_scales, v_scales);
        multiply_fp4<Fp4>(n + 1, out[n + 1], p, b[2], b[3], p_scales, v_scales);
      }
    }
    multiply_fp4<Fp4>(0, sum, p, ONES, ONES, p_scales, ONE_SCALES);
  }

  // Key within the block of column e of this lane's scores in tile n.
  static __device__ __forceinline__ int key_of(int n, int e) {
    return n / 4 * 32 + 8 * t() + n % 4 * 2 + e;
  }
};

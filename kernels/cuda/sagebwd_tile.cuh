// What SageBwd keeps in shared memory: tiles of 32 tokens, made of panels (panels.cuh), and the
// copies that fill them. Each kernel of the backward pass puts its tile together from these parts:
//
// scores    codes of Q or K, [HEAD_DIM / 32 panels][32 rows][32 channels], for Q K^T
// values    dO or V in 16 bits, [HEAD_DIM / 16 panels][32 rows][16 channels], for dO V^T
// transposed  codes of Q, K or dO, [HEAD_DIM rows][32 tokens], for the products that sum over tokens
//
// Rows of scores and values are in the order of row_of_key, whether they hold keys or queries: lane
// t of a quad gets four neighbouring tokens of each 16, in the order in which a product that sums
// over tokens wants what is made of them. Nothing moves between lanes.
#pragma once

#include "int8_layout.cuh"
#include "rows.cuh"

constexpr int TILE_TOKENS = 32;
constexpr int TILE_PANEL = TILE_TOKENS * 32;  // bytes

template <int HEAD_DIM>
struct TileBytes {
  static constexpr int SCORES = TILE_TOKENS * HEAD_DIM;
  static constexpr int VALUES = TILE_TOKENS * HEAD_DIM * 2;
  static constexpr int TRANSPOSED = TILE_TOKENS * HEAD_DIM;
};

// What the backward pass knows of each query, as it lies in memory, [B, Hq, panels * TILE_TOKENS].
// Where there is no query, or one that saw no key, `lse` is infinite and the rest zero: P is zero.
struct __align__(16) Query {
  float q_scale;      // of its codes, times the softmax scale and log2(e)
  float lse;          // log-sum-exp of its scores, times log2(e)
  float delta;        // D of the paper: dO . O
  float d_out_scale;  // of the codes of dO
};

// What a block of THREADS threads does together: each thread copies every THREADS-th 16 bytes.
template <int HEAD_DIM, int THREADS>
struct TileCopies {
  using Bytes = TileBytes<HEAD_DIM>;

  // `source`: anything that lies as it shall lie in shared memory.
  static __device__ __forceinline__ void as_it_is(u32 target, const void* source, int bytes) {
    for (int byte = thread_index_anew() * 16; byte < bytes; byte += THREADS * 16) {
      copy_16_bytes_async(target + byte, static_cast<const u8*>(source) + byte);
    }
  }

  // Half `half` of a block of K, see int8_layout.cuh.
  static __device__ __forceinline__ void keys(u32 target, const u8* block, int half) {
#pragma unroll 1
    for (int byte = thread_index_anew() * 16; byte < Bytes::SCORES; byte += THREADS * 16) {
      const int panel = byte / TILE_PANEL, rest = byte % TILE_PANEL;
      copy_16_bytes_async(target + byte,
                          block + panel * (BLOCK_KEYS * 32) + half * TILE_PANEL + rest);
    }
  }

  // Codes of Q of one head from `first` on; what is past the end repeats the last query.
  static __device__ __forceinline__ void queries(u32 target, const u8* codes, int first, int end) {
#pragma unroll 1
    for (int unit = thread_index_anew(); unit < Bytes::SCORES / 16; unit += THREADS) {
      const int panel = unit / (TILE_PANEL / 16), token = unit / 2 % TILE_TOKENS, half = unit % 2;
      const s64 row = min(first + token, end - 1);
      copy_16_bytes_async(
          target + panel * TILE_PANEL + panel_offset(row_of_key(token), 16 * half),
          codes + row * HEAD_DIM + 32 * panel + 16 * half);
    }
  }

  // 16-bit tokens from `first` on; what is past the end repeats the last one. Channels from
  // `head_dim` on are left alone.
  template <Dtype DTYPE>
  static __device__ __forceinline__ void values(u32 target, const Tensor& source, int batch,
                                                int head, int first, int end, int head_dim) {
#pragma unroll 1
    for (int unit = thread_index_anew(); unit < Bytes::VALUES / 16; unit += THREADS) {
      const int panel = unit / (TILE_PANEL / 16), token = unit / 2 % TILE_TOKENS, half = unit % 2;
      const int channel = 16 * panel + 8 * half;
      if (channel < head_dim) {
        copy_16_bytes_async(
            target + panel * TILE_PANEL + panel_offset(row_of_key(token), 16 * half),
            source.token<DTYPE>(batch, head, min(first + token, end - 1)) + channel * 2);
      }
    }
  }

  // So that channels which values() leaves alone are zeros. The caller ends it with a barrier.
  static __device__ __forceinline__ void clear(u8* shared, int bytes) {
    for (int byte = threadIdx.x * 16; byte < bytes; byte += THREADS * 16) {
      *reinterpret_cast<uint4*>(shared + byte) = make_uint4(0, 0, 0, 0);
    }
  }
};

// Codes of some tokens, on their way to being transposed.
#pragma once

#include "panels.cuh"
#include "rows.cuh"

// In shared memory of a block of THREADS threads. The extra word keeps columns out of each other's
// banks.
template <int HEAD_DIM, int TOKENS, int THREADS>
struct TokenCodes {
  u32 words[TOKENS][HEAD_DIM / 4 + 1];

  __device__ __forceinline__ u32 byte(int token, int channel) const {
    return reinterpret_cast<const u8*>(words[token])[channel];
  }

  // To [TOKENS / 32 panels][HEAD_DIM rows][32 tokens]. By all threads, after a barrier.
  __device__ __forceinline__ void store_transposed(u8* panels) const {
    static_assert(TOKENS % 32 == 0, "a panel is 32 tokens wide");
#pragma unroll
    for (int word = threadIdx.x; word < HEAD_DIM * (TOKENS / 4); word += THREADS) {
      const int four = word % 8 * 4, channel = word / 8 % HEAD_DIM, panel = word / 8 / HEAD_DIM;
      const int token = 32 * panel + four;
      *reinterpret_cast<u32*>(panels + panel * (HEAD_DIM * 32) + panel_offset(channel, four)) =
          pack_bytes(byte(token, channel), byte(token + 1, channel), byte(token + 2, channel),
                     byte(token + 3, channel));
    }
  }
};

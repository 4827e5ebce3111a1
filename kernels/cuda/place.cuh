// Which rows of which head a block of threads works on.
#pragma once

#include "types.cuh"

// Blocks of ROWS rows of all heads of all batches, in one dimension: grids' others end at 65535.
template <int ROWS>
struct Place {
  int row_block, head, batch;

  template <typename Params>
  __device__ __forceinline__ Place(const Params& p, int index) {
    const int row_blocks = (p.q_len + ROWS - 1) / ROWS;
    row_block = index % row_blocks;
    // Longest rows first, so that a causal call's last blocks are its short ones.
    if (p.causal) row_block = row_blocks - 1 - row_block;
    head = index / row_blocks % p.q_heads;
    batch = index / row_blocks / p.q_heads;
  }

  // How many keys there are for these rows.
  template <typename Params>
  __device__ __forceinline__ int keys(const Params& p) const {
    return p.causal ? min(p.kv_len, (row_block + 1) * ROWS) : p.kv_len;
  }
  template <typename Params>
  __device__ __forceinline__ s64 first_row(const Params& p) const {
    return (static_cast<s64>(batch) * p.q_heads + head) * p.q_len;
  }
  template <typename Params>
  __device__ __forceinline__ s64 kv_head(const Params& p) const {
    return static_cast<s64>(batch) * p.kv_heads + head / (p.q_heads / p.kv_heads);
  }
};

// What SageBwd on wgmma keeps of 64 tokens: everything that a product reads of them lies in one
// piece, in memory as in shared memory, so that one instruction copies it.
//
// CODES      of Q or K, [HEAD_DIM / 32 panels][64 rows][32 channels], for Q K^T
// VALUES     dO or V in 16 bits, [HEAD_DIM / 64 panels][64 rows][64 channels], for dO V^T and P^T dO
// TRANSPOSED  codes of Q, [2 panels][HEAD_DIM rows][32 tokens], for dS^T Q
// NUMBERS    codes of K in BF16, in the layout of values, for dS K
//
// Rows of codes and values are in the order of row_of_key (int8_layout.cuh), whether they hold keys
// or queries. Where there is no token, all are zero.
#pragma once

#include "int8_layout.cuh"
#include "pipeline.cuh"

constexpr int TILE_TOKENS = 64;
constexpr int CODE_PANEL = TILE_TOKENS * 32, VALUE_PANEL = TILE_TOKENS * 128;  // bytes

// Byte of a row's unit of 16 bytes in a panel of values: units change places by the row's last bits.
__device__ __forceinline__ int value_offset(int row, int unit) {
  return row * 128 + (unit ^ row % 8) * 16;
}

// Bytes of a word as BF16, exactly: byte LOW in the lower half, byte HIGH in the upper one.
template <int LOW, int HIGH>
__device__ __forceinline__ u32 bf16x2_of_bytes(u32 word) {
  // 0x43 before a byte: 128 and its lower seven bits, or 256 and twice those. Without the eighth bit
  // it is the former; less 128, or 256 if the byte has a sign, it is the number.
  const u32 x = permute_bytes(word, 0x43434343, 0x4040 | HIGH << 8 | LOW);
  return subtract_bf16x2(x & 0xff7fff7f, x & 0xff80ff80);
}

// What tiles of queries and of keys begin with.
template <int HEAD_DIM>
struct TileParts {
  static constexpr int CODES = 0, VALUES = TILE_TOKENS * HEAD_DIM;
  static constexpr int END = VALUES + TILE_TOKENS * HEAD_DIM * 2;
};

// What gradients have to know of queries: a row of a tile's facts each. With
// x = 2^(key scale * Q_SCALE * score + SHIFT), which is P in units of P_UNIT,
// x * (dP * SLOPE + OFFSET) is dS times the scale that TRANSPOSED has. This is Q_SCALE, but for
// queries far smaller than others of their tile: dS times it shares a scale with them (DsTile), and
// would vanish beside theirs.
enum QueryFact { Q_SCALE, SHIFT, SLOPE, OFFSET };

// P is kept in 16 bits: of FP16 they would not reach down to the P of long sequences.
template <Dtype DTYPE>
constexpr float P_UNIT = DTYPE == F16 ? 1.0f / 16384 : 1.0f;
template <Dtype DTYPE>
constexpr float LOG2_P_UNIT = DTYPE == F16 ? -14.0f : 0.0f;

// A tile of queries: parts, then facts, [4][64 queries].
template <int HEAD_DIM>
struct QueryTile : TileParts<HEAD_DIM> {
  static constexpr int TRANSPOSED = TileParts<HEAD_DIM>::END;
  static constexpr int FACTS = TRANSPOSED + TILE_TOKENS * HEAD_DIM;
  static constexpr int BYTES = FACTS + TILE_TOKENS * 16;
};

// A tile of keys: parts, then the scales of K.
template <int HEAD_DIM>
struct KeyTile : TileParts<HEAD_DIM> {
  static constexpr int NUMBERS = TileParts<HEAD_DIM>::END;
  static constexpr int NUMBER_BYTES = TILE_TOKENS * HEAD_DIM * 2;
  static constexpr int SCALES = NUMBERS + NUMBER_BYTES;
  static constexpr int BYTES = SCALES + SCALES_PER_BLOCK * 4;
};

// The keys that dS is in memory of, between a launch that writes it and one that reads it: of all
// key heads of the batch, one after the other, some from `first_head` on (the grid says how many),
// and of each the tiles from `first_tile` on.
struct Chunk {
  int first_head, first_tile, tiles;
};

// Tiles on their way through shared memory, STAGES at a time, of up to BYTES each.
template <int BYTES, int STAGES>
struct TileRing {
  static constexpr int STAGE = (BYTES + 1023) / 1024 * 1024;
  static constexpr int SIZE = STAGES * (STAGE + 2 * 8);

  u32 shared;

  __device__ __forceinline__ u32 tile(int stage) const { return shared + stage * STAGE; }
  __device__ __forceinline__ Barrier full(int stage) const { return barrier(2 * stage); }
  __device__ __forceinline__ Barrier empty(int stage) const { return barrier(2 * stage + 1); }

  // By one thread, before publish_barriers() and a __syncthreads(). readers: threads.
  __device__ __forceinline__ void start(int readers) const {
    for (int stage = 0; stage < STAGES; ++stage) {
      full(stage).init(1);
      empty(stage).init(readers);
    }
  }

  // By one thread: tiles 0 .. tiles - 1, whose copies bring(i, barrier to say so, target) begins.
  template <typename Bring>
  __device__ __forceinline__ void fill(int tiles, Bring bring) const {
    Turn<STAGES> turn;
    for (int i = 0; i < tiles; ++i) {
      if (i >= STAGES) empty(turn.stage).wait(turn.parity ^ 1);
      bring(i, full(turn.stage), tile(turn.stage));
      turn.advance();
    }
  }

 private:
  __device__ __forceinline__ Barrier barrier(int i) const {
    return {shared + STAGES * STAGE + i * 8};
  }
};

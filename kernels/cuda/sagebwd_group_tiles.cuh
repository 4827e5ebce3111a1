// What SageBwd on wgmma keeps of 64 tokens: everything that a product reads of them lies in one
// piece, in memory as in shared memory, so that one instruction copies it.
//
// CODES      of Q or K, [HEAD_DIM / 32 panels][64 rows][32 channels], for Q K^T
// VALUES     dO or V in 16 bits, [HEAD_DIM / 64 panels][64 rows][64 channels], for dO V^T and P^T dO
// TRANSPOSED  codes of Q or K, [2 panels][HEAD_DIM rows][32 tokens], for products over tokens
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

template <int HEAD_DIM>
struct TileParts {
  static constexpr int CODES = 0, VALUES = TILE_TOKENS * HEAD_DIM;
  static constexpr int TRANSPOSED = VALUES + TILE_TOKENS * HEAD_DIM * 2;
  static constexpr int END = TRANSPOSED + TILE_TOKENS * HEAD_DIM;
};

// What dK and dV have to know of queries: a row of a tile's facts each. With
// x = 2^(key scale * Q_SCALE * score + SHIFT), which is P in units of P_UNIT,
// x * (dP * SLOPE + OFFSET) is dS times the scale of Q.
enum QueryFact { Q_SCALE, SHIFT, SLOPE, OFFSET };

// P is kept in 16 bits: of FP16 they would not reach down to the P of long sequences.
template <Dtype DTYPE>
constexpr float P_UNIT = DTYPE == F16 ? 1.0f / 16384 : 1.0f;
template <Dtype DTYPE>
constexpr float LOG2_P_UNIT = DTYPE == F16 ? -14.0f : 0.0f;

// What dQ has to know of a query; of no use where there is no query.
struct __align__(16) QueryRow {
  float q_scale;  // of its codes, times the softmax scale and log2(e)
  float lse;      // log-sum-exp of its scores, times log2(e); infinite if it saw no key
  float delta;    // D of the paper: dO . O
  float unused;
};

// A tile of queries: parts, then facts, [4][64 queries]. Its rows are not copied.
template <int HEAD_DIM>
struct QueryTile : TileParts<HEAD_DIM> {
  static constexpr int FACTS = TileParts<HEAD_DIM>::END;
  static constexpr int COPIED = FACTS + TILE_TOKENS * 16;
  static constexpr int ROWS = COPIED;
  static constexpr int BYTES = ROWS + TILE_TOKENS * 16;
};

// A tile of keys: parts, then the scales of K.
template <int HEAD_DIM>
struct KeyTile : TileParts<HEAD_DIM> {
  static constexpr int SCALES = TileParts<HEAD_DIM>::END;
  static constexpr int COPIED = SCALES + SCALES_PER_BLOCK * 4;
  static constexpr int BYTES = COPIED;
};

// Tiles on their way through shared memory, STAGES at a time.
template <int COPIED, int STAGES>
struct TileRing {
  static constexpr int STAGE = (COPIED + 1023) / 1024 * 1024;
  static constexpr int SIZE = STAGES * (STAGE + 2 * 8);

  u32 shared;

  __device__ __forceinline__ u32 tile(int stage) const { return shared + stage * STAGE; }
  __device__ __forceinline__ Barrier full(int stage) const { return barrier(2 * stage); }
  __device__ __forceinline__ Barrier empty(int stage) const { return barrier(2 * stage + 1); }

  // By one thread, before publish_barriers() and a __syncthreads(). readers: warps.
  __device__ __forceinline__ void start(int readers) const {
    for (int stage = 0; stage < STAGES; ++stage) {
      full(stage).init(1);
      empty(stage).init(readers);
    }
  }

  // By one thread: tiles 0 .. tiles - 1, of which source(i) says where they lie.
  template <typename Source>
  __device__ __forceinline__ void fill(int tiles, Source source) const {
    Turn<STAGES> turn;
    for (int i = 0; i < tiles; ++i) {
      if (i >= STAGES) empty(turn.stage).wait(turn.parity ^ 1);
      full(turn.stage).expect(COPIED);
      full(turn.stage).copy(tile(turn.stage), source(i), COPIED);
      turn.advance();
    }
  }

 private:
  __device__ __forceinline__ Barrier barrier(int i) const {
    return {shared + STAGES * STAGE + i * 8};
  }
};

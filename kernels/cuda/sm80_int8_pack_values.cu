// Second launch of INT8 attention where V is long: its codes, once the ranges of its channels are
// known.
#include "int8_values.cuh"

// 80 registers, which three blocks leave, are too few for four tokens of FP32.
template <Dtype DTYPE>
constexpr int MIN_BLOCKS = DTYPE == F32 ? 2 : 3;

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(VALUE_THREADS, MIN_BLOCKS<DTYPE>)
sm80_int8_pack_values(const __grid_constant__ Values p) {
  __shared__ ValueChannels<HEAD_DIM> shared;
  // In the opposite order to the first launch: what that read last still lies in L2.
  const int index = gridDim.x - 1 - blockIdx.x;
  const int parts = (p.blocks * BLOCK_KEYS + VALUE_TOKENS - 1) / VALUE_TOKENS;
  const int part = index % parts, kv_head = index / parts;
  join_ranges(p, kv_head, shared);
  choose_scales(p, kv_head, part == 0, shared);
  pack_values<HEAD_DIM, DTYPE>(p, kv_head / p.kv_heads, kv_head % p.kv_heads, kv_head, part, shared);
}

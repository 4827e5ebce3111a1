// Second launch of attention with INT8 scores and FP4 values: V to NVFP4, and the largest of K's
// scales, by which the attention kernel knows how large scores can be.
#include "fp4_values.cuh"

using Params = Values;

template <int HEAD_DIM>
__device__ __forceinline__ void find_largest_scale(const Params& p, s64 kv_head) {
  using Block = Int8KvBlock<HEAD_DIM>;
  __shared__ float per_warp[THREADS / 32];
  const u8* blocks = p.kv + kv_head * p.blocks * Block::BYTES;
  float largest = 0.0f;
  for (int block = threadIdx.x; block < p.blocks; block += THREADS) {
    const u8* scales = blocks + static_cast<s64>(block) * Block::BYTES + Block::K_SCALES;
    const float4 k = *reinterpret_cast<const float4*>(scales);
    largest = max_nan(max_nan(largest, max_nan(k.x, k.y)), max_nan(k.z, k.w));
  }
  largest = max_over_block<THREADS>(largest, per_warp);
  if (threadIdx.x == 0) p.kv_scales[kv_head * 2] = largest;
}

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, 3)
sm80_int8_fp4_pack(const __grid_constant__ Params p) {
  __shared__ Turn turn;
  const int packer = blockIdx.x % p.packers();
  const s64 kv_head = blockIdx.x / p.packers();
  if (packer == 0) find_largest_scale<HEAD_DIM>(p, kv_head);
  const float* partials = p.partials + kv_head * p.chunks * PARTIAL_FLOATS<HEAD_DIM>;
  pack_values<Int8KvBlock<HEAD_DIM>, HEAD_DIM, DTYPE>(p, partials, packer, kv_head, turn);
}

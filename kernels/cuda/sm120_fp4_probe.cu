// One warp through the FP4 product with each choice of lanes that scales may come from, and through
// the rounding to E2M1: for the proof that a GPU computes them as fp4_mma.cuh says.
#include "fp4_mma.cuh"

struct Params {
  const uint4* a;      // [32 lanes]
  const uint2* b;      // [32]
  const u32* scales;   // [2 (A, B), 32]
  const float* x;      // [32, 8]
  float4* products;    // [2 A_PAIR, 4 B_LANE, 32]
  u32* codes;          // [32], of x
};

template <typename Fp4, int A_PAIR, int B_LANE>
__device__ __forceinline__ void probe(const Params& p) {
  const int lane = threadIdx.x;
  const uint4 a = p.a[lane];
  const uint2 b = p.b[lane];
  const u32 words[4] = {a.x, a.y, a.z, a.w};
  float d[4] = {};
  Fp4::template multiply<A_PAIR, B_LANE>(d, words, b.x, b.y, p.scales[lane], p.scales[32 + lane]);
  p.products[(A_PAIR * 4 + B_LANE) * 32 + lane] = make_float4(d[0], d[1], d[2], d[3]);
  if constexpr (B_LANE < 3) {
    probe<Fp4, A_PAIR, B_LANE + 1>(p);
  } else if constexpr (A_PAIR < 1) {
    probe<Fp4, A_PAIR + 1, 0>(p);
  }
}

template <typename Fp4>
__global__ void __launch_bounds__(32) sm120_fp4_probe(const __grid_constant__ Params p) {
  probe<Fp4, 0, 0>(p);
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = p.x[threadIdx.x * 8 + i];
  p.codes[threadIdx.x] = Fp4::pack_e2m1(x);
}

// The block-scaled FP4 matrix product and the rounding to E2M1 before it: by the tensor cores of
// compute capability 12.x, or emulated on any other. Both read and write the same registers, so
// that one kernel is built from either.
//
// D = (A * SFA) (B * SFB) + D: A [16, 64] and B [64, 8] in E2M1, SFA [16, 4] and SFB [4, 8] in E4M3,
// one for every 16 of the reduced dimension; D in FP32. Lane 4g + t holds
//   a[0..3]  A[g][8t .. 8t + 7], A[g + 8][8t ..], A[g][32 + 8t ..], A[g + 8][32 + 8t ..]
//   b0, b1   B[8t .. 8t + 7][g], B[32 + 8t ..][g]
//   d[0..3]  D[g][2t], D[g][2t + 1], D[g + 8][2t], D[g + 8][2t + 1]
// and a scale word holds four scales, the first in the low byte. Scales are read from some lanes
// only: SFA[g] from lane 4g + 2 * A_PAIR and SFA[g + 8] from the next one, SFB[][g] from 4g + B_LANE.
#pragma once

#include "nvfp4.cuh"

struct NativeFp4 {
  static constexpr int BLOCKS_UNROLLED = 2;  // of the attention kernel's loop over blocks of keys

#if __CUDA_ARCH__ >= 1200
  template <int A_PAIR, int B_LANE>
  static __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                  u32 sfa, u32 sfb) {
    asm volatile(
        "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col"
        ".f32.e2m1.e2m1.f32.ue4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, "
        "{%10}, {0,%12}, {%11}, {0,%13};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(sfa), "r"(sfb),
          "n"(A_PAIR), "n"(B_LANE));
  }

  static __device__ __forceinline__ u32 pack_e2m1(const float (&x)[8]) {
    return pack_e2m1_by_instruction(x);
  }
#endif
};

// E2M1 times E4M3 has six significant bits and fits FP16 exactly. So the scales go into A and B,
// after which the order of the reduced dimension is free: FP16 products of [16, 16] x [16, 8] take
// the values as the lanes hold them. FP32 sums of exact products: what the tensor core gives, but for
// the rounding of its own sums.
struct EmulatedFp4 {
  static constexpr int BLOCKS_UNROLLED = 1;  // the code is long enough

  template <int A_PAIR, int B_LANE>
  static __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                  u32 sfa, u32 sfb) {
    const int lane = threadIdx.x % 32, quad = lane & ~3;
    const u32 scales_g = __shfl_sync(0xffffffff, sfa, quad + 2 * A_PAIR);
    const u32 scales_g8 = __shfl_sync(0xffffffff, sfa, quad + 2 * A_PAIR + 1);
    const u32 scales_b = __shfl_sync(0xffffffff, sfb, quad + B_LANE);
    const u32 b[2] = {b0, b1};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int byte = 8 * (2 * half + lane / 2 % 2);  // of the block of 8t .. 8t + 7
      u32 row_g[4], row_g8[4], column[4];
      scaled(row_g, a[2 * half], scales_g >> byte);
      scaled(row_g8, a[2 * half + 1], scales_g8 >> byte);
      scaled(column, b[half], scales_b >> byte);
      mma_16bit<F16>(d, {row_g[0], row_g8[0], row_g[1], row_g8[1]}, {column[0], column[1]});
      mma_16bit<F16>(d, {row_g[2], row_g8[2], row_g[3], row_g8[3]}, {column[2], column[3]});
    }
  }

  static __device__ __forceinline__ u32 pack_e2m1(const float (&x)[8]) {
    return pack_e2m1_by_arithmetic(x);
  }

 private:
  // Eight nibbles times the scale in the low byte, as pairs of FP16.
  static __device__ __forceinline__ void scaled(u32 (&pairs)[4], u32 codes, u32 scale) {
    // E4M3's bits lie in FP16 as those of a number 2^8 smaller.
    const u32 factor = multiply_f16x2((scale & 0x7f) * 0x00800080u, 0x5c005c00u);
    const u32 sizes = codes & 0x77777777u, signs = codes & 0x88888888u;
    // High bytes of 0, .5, 1, 1.5, 2, 3, 4, 6 in FP16; the low bytes are zero.
    const u32 bytes[2] = {permute_bytes(0x3e3c3800u, 0x46444240u, sizes),
                          permute_bytes(0x3e3c3800u, 0x46444240u, sizes >> 16)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 pair = permute_bytes(bytes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
      const u32 sign = signs >> (8 * i);
      pairs[i] = multiply_f16x2(pair | (sign & 0x8) << 12 | (sign & 0x80) << 24, factor);
    }
  }
};

// With the scales of B where a layout of one word per column puts them: of column g of tile n of four
// in lane n of its quad. n is a constant once loops are unrolled.
template <typename Fp4>
__device__ __forceinline__ void multiply_fp4(int n, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                             u32 sfa, u32 sfb) {
  switch (n % 4) {
    case 0: return Fp4::template multiply<0, 0>(d, a, b0, b1, sfa, sfb);
    case 1: return Fp4::template multiply<0, 1>(d, a, b0, b1, sfa, sfb);
    case 2: return Fp4::template multiply<0, 2>(d, a, b0, b1, sfa, sfb);
    case 3: return Fp4::template multiply<0, 3>(d, a, b0, b1, sfa, sfb);
  }
}

// The instructions that C++ has no name for: conversions, matrix products, asynchronous copies,
// approximations.
#pragma once

#include "types.cuh"

__device__ __forceinline__ float f16_to_float(u32 low_half) {
  float x;
  asm("{.reg .b16 h, unused; mov.b32 {h, unused}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(low_half));
  return x;
}

__device__ __forceinline__ u32 pack_f16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Maxima and minima that keep NaN, so that a NaN input reaches the output instead of vanishing.
__device__ __forceinline__ float max_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

__device__ __forceinline__ float min_nan(float a, float b) {
  float m;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

// The same on a word of one FP32 or two 16-bit elements.
template <Dtype DTYPE>
__device__ __forceinline__ u32 max_nan_of(u32 a, u32 b) {
  u32 m;
  if constexpr (DTYPE == F32) {
    m = as_bits(max_nan(as_float(a), as_float(b)));
  } else if constexpr (DTYPE == BF16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  }
  return m;
}

template <Dtype DTYPE>
__device__ __forceinline__ u32 min_nan_of(u32 a, u32 b) {
  u32 m;
  if constexpr (DTYPE == F32) {
    m = as_bits(min_nan(as_float(a), as_float(b)));
  } else if constexpr (DTYPE == BF16) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  }
  return m;
}

// D = A B + C for A [16, 32] row-major, B [32, 8] column-major, 8-bit, accumulated in s32.
// Lane 4g + t holds A[g][4t..], A[g + 8][4t..], A[g][16 + 4t..], A[g + 8][16 + 4t..] in a[0..3],
// B[4t..][g], B[16 + 4t..][g] in b0, b1 and D[g][2t], D[g][2t + 1], D[g + 8][2t], D[g + 8][2t + 1].
#define MMA_OF_BYTES(NAME, TYPES)                                                                \
  __device__ __forceinline__ void NAME(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,           \
                                       const u32 (&c)[4]) {                                      \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." TYPES ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "     \
        "{%8,%9}, {%10,%11,%12,%13};"                                                            \
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),    \
          "r"(c[2]), "r"(c[3]));                                                                 \
  }
MMA_OF_BYTES(mma_s8_s8, "s8.s8")
MMA_OF_BYTES(mma_u8_s8, "u8.s8")
MMA_OF_BYTES(mma_u8_u8, "u8.u8")
#undef MMA_OF_BYTES

// D += A B for A [16, 16] row-major, B [16, 8] column-major, in FP16 or (else) BF16, D in FP32.
// Lane 4g + t holds A[g][2t..], A[g + 8][2t..], A[g][8 + 2t..], A[g + 8][8 + 2t..] in a[0..3],
// B[2t..][g], B[8 + 2t..][g] in b[0..1] and D as above.
template <Dtype DTYPE>
__device__ __forceinline__ void mma_16bit(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (DTYPE == F16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Four 8 x 16-byte matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

__device__ __forceinline__ void copy_16_bytes_async(u32 shared_address, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(global)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `PENDING` of this thread's committed groups of copies are under way.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ u32 shared_address_of(const void* shared) {
  return static_cast<u32>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ float load_shared_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ u32 load_shared_word(u32 address) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void load_shared_words(u32 (&x)[2], u32 address) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared_words(u32 (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared_words(u32 address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void load_shared_floats(float (&x)[2], u32 address) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared_floats(float (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// blockIdx.x, read where it stands: a register that holds it would be one less for everything else.
__device__ __forceinline__ int block_index_anew() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

__device__ __forceinline__ int thread_index_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// sum + the four unsigned bytes of `bytes`
__device__ __forceinline__ u32 add_bytes(u32 bytes, u32 sum) {
  u32 d;
  asm("dp4a.u32.u32 %0, %1, 0x01010101, %2;" : "=r"(d) : "r"(bytes), "r"(sum));
  return d;
}

__device__ __forceinline__ u32 multiply_f16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 add_f16x2(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// a b + c, rounded once.
__device__ __forceinline__ u32 multiply_add_f16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Compute capability 9.0 on.
__device__ __forceinline__ u32 subtract_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// An 8 x 8 matrix of 16-bit elements, transposed: of row g, lane 4g + t holds elements 2t and 2t + 1.
__device__ __forceinline__ u32 transpose_16bit(u32 x) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}

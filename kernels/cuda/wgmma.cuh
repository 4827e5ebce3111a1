// Matrix products of a warpgroup (four warps) on compute capability 9.0: D += A B with A [64, k] in
// registers or shared memory, B [k, n] in shared memory, D [64, n] in registers (PTX ISA, section
// 9.7.15).
//
// They run on their own: between wgmma_begin() and wgmma_end(), nobody may touch D, A or B. Of its
// warp's 16 rows, lane 4g + t holds A and D like mma.sync does (see ptx.cuh), the eights of D's
// columns one after the other.
#pragma once

#include "ptx.cuh"

// How an operand lies in shared memory: a panel of panels.cuh, 32-byte rows along k of which eights
// follow each other. The descriptor of PTX ISA, section 9.7.15.5.1, is two words; sums of addresses
// stay within the first.
struct WgmmaOperand {
  static constexpr u32 LEADING = 16, STRIDE = 8 * 32, SWIZZLE_32 = 3;

  u32 low;

  static __device__ __forceinline__ WgmmaOperand panel(u32 address) {
    return {(address & 0x3ffff) >> 4 | LEADING >> 4 << 16};
  }
  __device__ __forceinline__ WgmmaOperand operator+(int bytes) const { return {low + (bytes >> 4)}; }

  __device__ __forceinline__ u64 descriptor() const {
    u64 bits;
    asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "r"(low), "n"(STRIDE >> 4 | SWIZZLE_32 << 30));
    return bits;
  }
};

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Waits for all products since wgmma_begin().
__device__ __forceinline__ void wgmma_end() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Keeps the compiler from reading or moving registers of a product that is under way.
template <int N>
__device__ __forceinline__ void pin(u32 (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

#define LIST_32                                                                                 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define LIST_48 \
  LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define LIST_64                                                                                    \
  LIST_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SIXTEEN(d, i)                                                                         \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
      "+r"(d[i + 6]), "+r"(d[i + 7]), "+r"(d[i + 8]), "+r"(d[i + 9]), "+r"(d[i + 10]),        \
      "+r"(d[i + 11]), "+r"(d[i + 12]), "+r"(d[i + 13]), "+r"(d[i + 14]), "+r"(d[i + 15])

// D [64, 128] = A [64, 32] B, or D += A B, in s8 and s32; A and B: panels.
__device__ __forceinline__ void wgmma_s8(u32 (&d)[64], WgmmaOperand a, WgmmaOperand b, bool adds) {
  asm volatile(
      "{.reg .pred adds; setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " LIST_64 "}, %64, %65, adds;}"
      : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)
      : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(adds)));
}

// D [64, n] = A [64, 32] B, or D += A B, in u8 x s8 and s32, for n of 64, 96 and 128; A: registers,
// B: a panel.
#define WGMMA_U8(N, REGISTERS, LIST, A0, A1, A2, A3, B, ADDS, ...)                              \
  __device__ __forceinline__ void wgmma_u8(u32 (&d)[REGISTERS], const u32 (&a)[4],              \
                                           WgmmaOperand b, bool adds) {                         \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" #ADDS ", 0;\n"                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.u8.s8 " LIST "}, {%" #A0 ",%" #A1 \
                 ",%" #A2 ",%" #A3 "}, %" #B ", adds;}"                                         \
                 : __VA_ARGS__                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()),                     \
                   "r"(static_cast<int>(adds)));                                                \
  }
WGMMA_U8(64, 32, LIST_32, 32, 33, 34, 35, 36, 37, SIXTEEN(d, 0), SIXTEEN(d, 16))
WGMMA_U8(96, 48, LIST_48, 48, 49, 50, 51, 52, 53, SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32))
WGMMA_U8(128, 64, LIST_64, 64, 65, 66, 67, 68, 69, SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32),
         SIXTEEN(d, 48))

#undef WGMMA_U8
#undef SIXTEEN
#undef LIST_64
#undef LIST_48
#undef LIST_32

// Registers that each thread of this warpgroup may use from here on; all four warps say the same.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Ordinary writes of this thread to shared memory, before products that read them.
__device__ __forceinline__ void publish_to_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// `THREADS` threads, whole warps, meet at the named barrier `id`.
template <int THREADS>
__device__ __forceinline__ void synchronise(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

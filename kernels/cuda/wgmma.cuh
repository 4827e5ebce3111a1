// Matrix products of a warpgroup (four warps) on compute capability 9.0: D += A B with A [64, k] in
// registers or shared memory, B [k, n] in shared memory, D [64, n] in registers (PTX ISA, section
// 9.7.15).
//
// They run on their own: between wgmma_begin() and the end of the wait for them, nobody may touch D, A
// or B. Of its warp's 16 rows, lane 4g + t holds A and D like mma.sync does (see ptx.cuh), the eights
// of D's columns one after the other.
#pragma once

#include "ptx.cuh"

// How an operand lies in shared memory: a descriptor of PTX ISA, section 9.7.15.5.1, in two words;
// sums of addresses stay within the first. Swizzling permutes the 16-byte units of a row by the bits
// of the row's number; addresses below are those before it.
struct WgmmaOperand {
  u32 low, high;

  __device__ __forceinline__ WgmmaOperand operator+(int bytes) const {
    return {low + (bytes >> 4), high};
  }

  // Rows of n (of A: of its own), 32 bytes each along k, as in panels.cuh: eights of rows follow each
  // other.
  static __device__ __forceinline__ WgmmaOperand panel(u32 address) {
    return make(address, 16, 8 * 32, 3);
  }

  // The same with 128 bytes each, of which a product takes 32: the next ones are 32 bytes on.
  static __device__ __forceinline__ WgmmaOperand wide_panel(u32 address) {
    return make(address, 16, 8 * 128, 1);
  }

  // Rows of k, 128 bytes each along n; eights of rows follow each other. Wider matrices go on
  // `next` bytes later.
  static __device__ __forceinline__ WgmmaOperand rows_of_128_bytes(u32 address, int next) {
    return make(address, next, 8 * 128, 1);
  }

  __device__ __forceinline__ u64 descriptor() const {
    u64 bits;
    asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "r"(low), "r"(high));
    return bits;
  }

 private:
  static __device__ __forceinline__ WgmmaOperand make(u32 address, u32 leading, u32 stride,
                                                      u32 swizzle) {
    return {(address & 0x3ffff) >> 4 | leading >> 4 << 16, stride >> 4 | swizzle << 30};
  }
};

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most `PENDING` of the committed groups are under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from reading or moving registers of a product that is under way.
template <int N>
__device__ __forceinline__ void pin(u32 (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

#define LIST_32                                                                                 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define LIST_64                                                                                     \
  LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
          "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define EIGHT(kind, d, i)                                                                     \
  kind(d[i]), kind(d[i + 1]), kind(d[i + 2]), kind(d[i + 3]), kind(d[i + 4]), kind(d[i + 5]), \
      kind(d[i + 6]), kind(d[i + 7])
#define SIXTEEN(kind, d, i) EIGHT(kind, d, i), EIGHT(kind, d, i + 8)
#define THIRTY_TWO(kind, d, i) SIXTEEN(kind, d, i), SIXTEEN(kind, d, i + 16)

// What follows defines products by name, shape and types, D's registers, and numbers of the operands
// after those of D. `adds`: D += A B; else D = A B.
#define WGMMA_OF_REGISTERS(NAME, SHAPE, REGISTERS, LIST, A0, A1, A2, A3, B, ADDS, ...)            \
  __device__ __forceinline__ void NAME(u32 (&d)[REGISTERS], const u32 (&a)[4], WgmmaOperand b,    \
                                       bool adds) {                                               \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" #ADDS ", 0;\n"                           \
                 "wgmma.mma_async.sync.aligned." SHAPE " " LIST "}, {%" #A0 ",%" #A1 ",%" #A2      \
                 ",%" #A3 "}, %" #B ", adds;}"                                                    \
                 : __VA_ARGS__                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()),               \
                   "r"(static_cast<int>(adds)));                                                  \
  }
// MODIFIERS of 16-bit products: A's sign, B's sign, A transposed, B transposed.
#define WGMMA_OF_PANELS(NAME, SHAPE, MODIFIERS, REGISTERS, LIST, A, B, ADDS, ...)                 \
  __device__ __forceinline__ void NAME(u32 (&d)[REGISTERS], WgmmaOperand a, WgmmaOperand b,       \
                                       bool adds) {                                               \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" #ADDS ", 0;\n"                           \
                 "wgmma.mma_async.sync.aligned." SHAPE " " LIST "}, %" #A ", %" #B                \
                 ", adds" MODIFIERS ";}"                                                          \
                 : __VA_ARGS__                                                                    \
                 : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(adds)));        \
  }
#define WGMMA_ADDING_FLOATS(NAME, SHAPE, REGISTERS, LIST, A0, A1, A2, A3, B, ...)                 \
  __device__ __forceinline__ void NAME(float (&d)[REGISTERS], const u32 (&a)[4], WgmmaOperand b) { \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, 1, 0;\n"                                    \
                 "wgmma.mma_async.sync.aligned." SHAPE " " LIST "}, {%" #A0 ",%" #A1 ",%" #A2      \
                 ",%" #A3 "}, %" #B ", adds, 1, 1, 1;}"                                           \
                 : __VA_ARGS__                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()));              \
  }

// D [64, n] of A [64, 32] and B [32, n], integers of 8 bits and of 32; panels.
WGMMA_OF_PANELS(wgmma_s8, "m64n64k32.s32.s8.s8", "", 32, LIST_32, 32, 33, 34,
                THIRTY_TWO("+r", d, 0))
WGMMA_OF_PANELS(wgmma_s8, "m64n128k32.s32.s8.s8", "", 64, LIST_64, 64, 65, 66,
                THIRTY_TWO("+r", d, 0), THIRTY_TWO("+r", d, 32))
WGMMA_OF_REGISTERS(wgmma_s8, "m64n64k32.s32.s8.s8", 32, LIST_32, 32, 33, 34, 35, 36, 37,
                   THIRTY_TWO("+r", d, 0))
WGMMA_OF_REGISTERS(wgmma_u8, "m64n64k32.s32.u8.u8", 32, LIST_32, 32, 33, 34, 35, 36, 37,
                   THIRTY_TWO("+r", d, 0))
WGMMA_OF_REGISTERS(wgmma_u8, "m64n128k32.s32.u8.u8", 64, LIST_64, 64, 65, 66, 67, 68, 69,
                   THIRTY_TWO("+r", d, 0), THIRTY_TWO("+r", d, 32))

// D [64, 64] of A [64, 16] and B [16, 64] in FP16 or BF16 and, as bits, FP32; A and B: wide panels.
WGMMA_OF_PANELS(wgmma_f16, "m64n64k16.f32.f16.f16", ", 1, 1, 0, 0", 32, LIST_32, 32, 33, 34,
                THIRTY_TWO("+r", d, 0))
WGMMA_OF_PANELS(wgmma_bf16, "m64n64k16.f32.bf16.bf16", ", 1, 1, 0, 0", 32, LIST_32, 32, 33, 34,
                THIRTY_TWO("+r", d, 0))

// D [64, n] += A [64, 16] B in FP16 or BF16 and FP32; B: rows of 128 bytes.
WGMMA_ADDING_FLOATS(wgmma_f16, "m64n64k16.f32.f16.f16", 32, LIST_32, 32, 33, 34, 35, 36,
                    THIRTY_TWO("+f", d, 0))
WGMMA_ADDING_FLOATS(wgmma_bf16, "m64n64k16.f32.bf16.bf16", 32, LIST_32, 32, 33, 34, 35, 36,
                    THIRTY_TWO("+f", d, 0))
WGMMA_ADDING_FLOATS(wgmma_f16, "m64n128k16.f32.f16.f16", 64, LIST_64, 64, 65, 66, 67, 68,
                    THIRTY_TWO("+f", d, 0), THIRTY_TWO("+f", d, 32))
WGMMA_ADDING_FLOATS(wgmma_bf16, "m64n128k16.f32.bf16.bf16", 64, LIST_64, 64, 65, 66, 67, 68,
                    THIRTY_TWO("+f", d, 0), THIRTY_TWO("+f", d, 32))

// Those in FP16 or (else) BF16.
template <Dtype DTYPE, int N>
__device__ __forceinline__ void wgmma_16bit(u32 (&d)[N], WgmmaOperand a, WgmmaOperand b,
                                            bool adds) {
  if constexpr (DTYPE == F16) wgmma_f16(d, a, b, adds);
  else wgmma_bf16(d, a, b, adds);
}

template <Dtype DTYPE, int N>
__device__ __forceinline__ void wgmma_16bit(float (&d)[N], const u32 (&a)[4], WgmmaOperand b) {
  if constexpr (DTYPE == F16) wgmma_f16(d, a, b);
  else wgmma_bf16(d, a, b);
}

#undef WGMMA_ADDING_FLOATS
#undef WGMMA_OF_PANELS
#undef WGMMA_OF_REGISTERS
#undef THIRTY_TWO
#undef SIXTEEN
#undef EIGHT
#undef LIST_64
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

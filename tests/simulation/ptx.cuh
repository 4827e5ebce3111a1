// Stand-in for kernels/cuda/ptx.cuh: the same functions, as the PTX ISA describes the instructions.
#pragma once

#include "types.cuh"

// --------------------------------------------------------------------------------------- conversions
inline float f16_to_float(u32 low_half) {
  return bits_of<_Float16>(static_cast<u16>(low_half));
}
inline u32 float_to_f16(float x) { return bits_of<u16>(static_cast<_Float16>(x)); }
inline u32 pack_f16x2(float low, float high) { return float_to_f16(low) | float_to_f16(high) << 16; }
inline u32 float_to_bf16(float x) {
  const u32 bits = as_bits(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16x2(float low, float high) {
  return float_to_bf16(low) | float_to_bf16(high) << 16;
}
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : fminf(a, b); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
template <Dtype DTYPE, typename Choose>
u32 choose_of(u32 a, u32 b, Choose choose) {
  if (DTYPE == F32) return as_bits(choose(as_float(a), as_float(b)));
  u32 chosen = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const u16 x = a >> shift, y = b >> shift;
    const auto value = [](u32 half) {
      return DTYPE == F16 ? f16_to_float(half) : as_float(half << 16);
    };
    const float m = choose(value(x), value(y));
    chosen |= (DTYPE == F16 ? float_to_f16(m) : float_to_bf16(m)) << shift;
  }
  return chosen;
}
template <Dtype DTYPE>
u32 max_nan_of(u32 a, u32 b) {
  return choose_of<DTYPE>(a, b, max_nan);
}
template <Dtype DTYPE>
u32 min_nan_of(u32 a, u32 b) {
  return choose_of<DTYPE>(a, b, min_nan);
}
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline int block_index_anew() { return blockIdx.x; }
inline int thread_index_anew() { return threadIdx.x; }
inline u32 add_bytes(u32 bytes, u32 sum) {
  for (int i = 0; i < 4; ++i) sum += bytes >> (8 * i) & 0xff;
  return sum;
}
inline u32 add_f16x2(u32 a, u32 b) {
  return pack_f16x2(f16_to_float(a) + f16_to_float(b), f16_to_float(a >> 16) + f16_to_float(b >> 16));
}
inline u32 multiply_f16x2(u32 a, u32 b) {
  return pack_f16x2(f16_to_float(a) * f16_to_float(b), f16_to_float(a >> 16) * f16_to_float(b >> 16));
}
inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 choice = selector >> (4 * i) & 15, byte = bytes >> (8 * (choice & 7)) & 0xff;
    d |= (choice & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << (8 * i);
  }
  return d;
}

// ------------------------------------------------------------------------------------ shared memory
inline u32 shared_address_of(const void* shared) {
  return static_cast<const char*>(shared) - shared_memory;
}
template <typename T>
const T& shared_at(u32 address) {
  if (address % sizeof(T) || address + sizeof(T) > shared_bytes) fail("a wrong shared address");
  return *reinterpret_cast<const T*>(shared_memory + address);
}
inline float load_shared_float(u32 address) { return shared_at<float>(address); }
inline u32 load_shared_word(u32 address) { return shared_at<u32>(address); }
inline void load_shared_words(u32 (&x)[2], u32 address) {
  const uint2 v = shared_at<uint2>(address);
  x[0] = v.x, x[1] = v.y;
}
inline void load_shared_words(u32 (&x)[4], u32 address) {
  const uint4 v = shared_at<uint4>(address);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
inline void load_shared_floats(float (&x)[4], u32 address) {
  const float4 v = shared_at<float4>(address);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// Copies by which a thread does not wait: their places hold NaN until they are waited for, and what
// they bring is read as late as can be.
struct Copy {
  u32 target;
  const void* source;
  int group;
};
struct Copies {
  std::vector<Copy> waiting;
  int groups = 0;  // committed
};
inline Copies& my_copies() {
  static std::vector<Copies> of_threads;
  static unsigned block = 0;
  if (block != blocks_begun) of_threads.assign(fibers.size(), {}), block = blocks_begun;
  return of_threads[threadIdx.x];
}
inline void copy_16_bytes_async(u32 address, const void* global) {
  if (reinterpret_cast<u64>(global) % 16) fail("a copy from between two vectors");
  memset(const_cast<uint4*>(&shared_at<uint4>(address)), 0xff, 16);
  my_copies().waiting.push_back({address, global, my_copies().groups});
}
inline void commit_copies() { ++my_copies().groups; }
template <int PENDING>
void wait_for_copies() {
  Copies& mine = my_copies();
  std::vector<Copy> still;
  for (const Copy& copy : mine.waiting) {
    if (copy.group < mine.groups - PENDING) {
      memcpy(shared_memory + copy.target, copy.source, 16);
    } else {
      still.push_back(copy);
    }
  }
  mine.waiting = still;
}

inline void ldmatrix_x4(u32 (&r)[4], u32 address) {
  my_desk().in[0] = address;
  meet_warp([](Desk(&warp)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const uint4& row = shared_at<uint4>(warp[8 * matrix + lane / 4].in[0]);
        warp[lane].out[matrix] = reinterpret_cast<const u32*>(&row)[lane % 4];
      }
    }
  });
  for (int i = 0; i < 4; ++i) r[i] = my_desk().out[i];
}

// ---------------------------------------------------------------------------------- matrix products
// FP64 sums, rounded once.
template <Dtype DTYPE>
void mma_16bit(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  const u32 in[10] = {a[0], a[1], a[2], a[3], b[0], b[1],
                      as_bits(d[0]), as_bits(d[1]), as_bits(d[2]), as_bits(d[3])};
  std::copy(in, in + 10, my_desk().in);
  meet_warp([](Desk(&warp)[32]) {
    double a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 2; ++i) {
        const auto half = [&](int word) {
          const u32 bits = warp[lane].in[word] >> (16 * i);
          return DTYPE == F16 ? f16_to_float(bits) : as_float(bits << 16);
        };
        a[g][2 * t + i] = half(0), a[g + 8][2 * t + i] = half(1);
        a[g][8 + 2 * t + i] = half(2), a[g + 8][8 + 2 * t + i] = half(3);
        b[2 * t + i][g] = half(4), b[8 + 2 * t + i][g] = half(5);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        double sum = as_float(warp[lane].in[6 + i]);
        for (int k = 0; k < 16; ++k) {
          sum += a[lane / 4 + 8 * (i / 2)][k] * b[k][2 * (lane % 4) + i % 2];
        }
        warp[lane].out[i] = as_bits(sum);
      }
    }
  });
  for (int i = 0; i < 4; ++i) d[i] = as_float(my_desk().out[i]);
}

template <typename A>
void mma_8bit(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const u32 (&c)[4]) {
  const u32 in[10] = {a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]};
  std::copy(in, in + 10, my_desk().in);
  meet_warp([](Desk(&warp)[32]) {
    static int a[16][32], b[8][32];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const auto byte = [&](int word) { return warp[lane].in[word] >> (8 * i); };
        for (int word = 0; word < 4; ++word) {
          a[g + word % 2 * 8][word / 2 * 16 + 4 * t + i] = static_cast<A>(byte(word));
        }
        b[g][4 * t + i] = static_cast<int8_t>(byte(4)), b[g][16 + 4 * t + i] = static_cast<int8_t>(byte(5));
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int *row = a[lane / 4 + 8 * (i / 2)], *column = b[2 * (lane % 4) + i % 2];
        u32 sum = warp[lane].in[6 + i];
        for (int k = 0; k < 32; ++k) sum += row[k] * column[k];
        warp[lane].out[i] = sum;
      }
    }
  });
  for (int i = 0; i < 4; ++i) d[i] = my_desk().out[i];
}
inline void mma_s8_s8(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const u32 (&c)[4]) {
  mma_8bit<int8_t>(d, a, b0, b1, c);
}
inline void mma_u8_s8(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const u32 (&c)[4]) {
  mma_8bit<uint8_t>(d, a, b0, b1, c);
}

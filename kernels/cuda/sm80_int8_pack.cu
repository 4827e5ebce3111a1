// Second launch of INT8 attention: smooths, quantises and lays out K and V for the tensor cores.
#include "int8_layout.cuh"
#include "kv_statistics.cuh"

struct Params {
  Tensor k, v;
  LiveKeys live;
  const float* partials;  // of the prologue
  u8* k_codes;            // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM]
  u8* v_codes;            // likewise
  float* k_scales;        // [B, Hk, blocks, SCALES_PER_BLOCK]
  float* v_channels;      // [B, Hk, 2, HEAD_DIM]: scales and means of V's channels
  int kv_heads, kv_len, head_dim;
  int chunks;
  int blocks;  // of BLOCK_KEYS keys
};

constexpr int THREADS = 128;

// What the partial reductions of one (batch, key head) say about a channel, times RANGE.
struct Channel {
  float mean, amax;  // amax: of the values less the mean
};

template <int HEAD_DIM, bool WITH_AMAX>
__device__ __forceinline__ Channel finish_statistics(const float* partials, int chunks, int kv_len,
                                                     int channel) {
  float sum = 0.0f, low = FLOAT_MAX, high = -FLOAT_MAX, count = 0.0f;
#pragma unroll 4
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const float* partial = partials + chunk * PARTIAL_FLOATS<HEAD_DIM>;
    sum += partial[channel];
    count += partial[3 * HEAD_DIM];
    if (WITH_AMAX) {
      low = min_nan(low, partial[HEAD_DIM + channel]);
      high = max_nan(high, partial[2 * HEAD_DIM + channel]);
    }
  }
  if (count == 0.0f) return {0.0f, 0.0f};
  const float mean = sum * (kv_len / count);  // the prologue divided by the number of all keys
  return {mean, max_nan(high - mean, mean - low)};
}

// Means of K's or V's channels times RANGE, and of V's the factor from values times RANGE to codes.
// Ends with a barrier.
template <int HEAD_DIM, bool VALUES>
__device__ __forceinline__ void read_channels(const Params& p, s64 kv_head, bool writes,
                                              float (&mean)[HEAD_DIM], float (&inverse)[HEAD_DIM]) {
  const float* partials = p.partials + (kv_head * 2 + VALUES) * p.chunks * PARTIAL_FLOATS<HEAD_DIM>;
  for (int channel = threadIdx.x; channel < HEAD_DIM; channel += THREADS) {
    const Channel found =
        finish_statistics<HEAD_DIM, VALUES>(partials, p.chunks, p.kv_len, channel);
    mean[channel] = found.mean;
    if (VALUES) {
      const float amax = max_nan(found.amax, SMALLEST_AMAX);
      inverse[channel] = INT8_MAX / amax;
      if (writes) {
        float* channels = p.v_channels + kv_head * 2 * HEAD_DIM;
        channels[channel] = amax * (1.0f / (INT8_MAX * RANGE));
        channels[HEAD_DIM + channel] = found.mean * (1.0f / RANGE);
      }
    }
  }
  __syncthreads();
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void pack_keys(const Params& p, int block, int head, int batch,
                                          float (&mean)[HEAD_DIM], float (&inverse)[HEAD_DIM]) {
  constexpr int TOKENS = 2;  // per quad
  const s64 kv_head = static_cast<s64>(batch) * p.kv_heads + head;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  // A warp takes the 16 keys that share a scale: those of one block and of one lane of the quads.
  const int group = warp;
  int row[TOKENS];
  bool exists[TOKENS];
  Octet<DTYPE> octets[TOKENS][HEAD_DIM / 32];
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    const int member = lane / 4 + 8 * i;
    const int in_block = member / 4 * 16 + group * 4 + member % 4;
    const int key = block * BLOCK_KEYS + in_block;
    row[i] = row_of_key(in_block);
    exists[i] = key < p.kv_len && p.live(batch, head, key);
    const char* source = p.k.token<DTYPE>(batch, head, exists[i] ? key : 0);
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
      const int channel = 32 * c + 8 * t;
      octets[i][c].clear();
      if (exists[i] && channel < p.head_dim) {
        octets[i][c].load(source + channel * ELEMENT_BYTES<DTYPE>);
      }
    }
  }
  read_channels<HEAD_DIM, false>(p, kv_head, false, mean, inverse);

  QuadRow<HEAD_DIM> rows[TOKENS];
  float amax = SMALLEST_AMAX;
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float smooth = fmaf(octets[i][c][e], RANGE, -mean[32 * c + 8 * t + e]);
        rows[i].x[c][e] = exists[i] ? smooth : 0.0f;
      }
    }
    rows[i].rotate(t);
    amax = max_nan(amax, rows[i].amax());
  }
  amax = max_over_quad(amax);
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    amax = max_nan(amax, __shfl_xor_sync(0xffffffff, amax, distance));
  }

  const s64 target = kv_head * p.blocks + block;
  u8* codes = p.k_codes + target * (BLOCK_KEYS * HEAD_DIM);
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 32; ++c) {
      *reinterpret_cast<uint2*>(codes + c * (BLOCK_KEYS * 32) + panel_offset(row[i], 8 * t)) =
          rows[i].codes(c, INT8_MAX / amax);
    }
  }
  if (lane == 0) p.k_scales[target * SCALES_PER_BLOCK + group] = rotated_scale<HEAD_DIM>(amax);
}

template <int HEAD_DIM, Dtype DTYPE>
__device__ __forceinline__ void pack_values(const Params& p, int block, int head, int batch,
                                            float (&mean)[HEAD_DIM], float (&inverse)[HEAD_DIM]) {
  constexpr int UNITS = BLOCK_KEYS / 32 * (HEAD_DIM / 32);  // 32 keys x 32 channels, one per warp
  const s64 kv_head = static_cast<s64>(batch) * p.kv_heads + head;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int four = lane % 8, octet = lane / 8;  // this lane's 4 keys and 8 channels of a unit
  u8* target = p.v_codes + (kv_head * p.blocks + block) * (BLOCK_KEYS * HEAD_DIM);
  Octet<DTYPE> octets[4];
  bool exists[4];
  auto load = [&](int unit) {
    const int panel = unit / (HEAD_DIM / 32), channel = unit % (HEAD_DIM / 32) * 32 + octet * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = block * BLOCK_KEYS + panel * 32 + four * 4 + i;
      exists[i] = key < p.kv_len && channel < p.head_dim && p.live(batch, head, key);
      octets[i].clear();
      if (exists[i]) {
        octets[i].load(p.v.token<DTYPE>(batch, head, key) + channel * ELEMENT_BYTES<DTYPE>);
      }
    }
  };

  load(warp);
  read_channels<HEAD_DIM, true>(p, kv_head, block == 0, mean, inverse);
  for (int unit = warp; unit < UNITS; unit += THREADS / 32) {
    if (unit != warp) load(unit);
    const int panel = unit / (HEAD_DIM / 32), channel = unit % (HEAD_DIM / 32) * 32 + octet * 8;
    u8* codes = target + panel * (HEAD_DIM * 32);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      u32 b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float smooth = fmaf(octets[i][e], RANGE, -mean[channel + e]);
        b[i] = round_to_byte(exists[i] ? smooth : 0.0f, inverse[channel + e]);
      }
      *reinterpret_cast<u32*>(codes + panel_offset(channel + e, four * 4)) =
          pack_bytes(b[0], b[1], b[2], b[3]);
    }
  }
}

// A lane holds two rows' quarters as read and as FP32; wide rows need all of its registers.
template <int HEAD_DIM, Dtype DTYPE>
constexpr int MIN_BLOCKS = HEAD_DIM * ELEMENT_BYTES<DTYPE> <= 256 ? 5 : 2;

template <int HEAD_DIM, Dtype DTYPE>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS<HEAD_DIM, DTYPE>)
sm80_int8_pack(const __grid_constant__ Params p) {
  __shared__ float mean[HEAD_DIM], inverse[HEAD_DIM];
  // One grid dimension, as the others end at 65535 heads or batches.
  const int block = blockIdx.x % p.blocks, values = blockIdx.x / p.blocks % 2;
  const int kv_head = blockIdx.x / p.blocks / 2;
  const int head = kv_head % p.kv_heads, batch = kv_head / p.kv_heads;
  if (values) {
    pack_values<HEAD_DIM, DTYPE>(p, block, head, batch, mean, inverse);
  } else {
    pack_keys<HEAD_DIM, DTYPE>(p, block, head, batch, mean, inverse);
  }
}

// V of one head to INT8: a scale and an offset per channel over all tokens, codes transposed.
//
// A channel's codes span its range over the live tokens, so that an offset common to all of them
// costs no resolution; attention weights sum to one, and so it is added back to the output. Codes
// are 1..255, so that products with P are never negative.
#pragma once

#include "int8_layout.cuh"
#include "live_keys.cuh"

constexpr int VALUE_THREADS = 256;
constexpr int VALUE_TOKENS = 256;   // packed by one block of threads
constexpr float HALF_RANGE = 126.5f;  // in codes: half a code is left for rounding the offset
constexpr float MIDDLE_CODE = 128.0f;

struct Values {
  Tensor v;
  LiveKeys live;
  u8* codes;        // [B, Hk, blocks, BLOCK_KEYS * HEAD_DIM], see int8_layout.cuh
  float* channels;  // [B, Hk, 2, HEAD_DIM]: scales and offsets of the channels
  float* ranges;    // [B, Hk, chunks, 2, HEAD_DIM]: lowest and highest value in each chunk of tokens
  int kv_heads, kv_len, head_dim;
  int blocks;                // of BLOCK_KEYS keys
  int chunks, chunk_tokens;  // that ranges are found in
};

// Shared by the threads of a block.
template <int HEAD_DIM>
struct ValueChannels {
  float low[HEAD_DIM], high[HEAD_DIM];
  float inverse[HEAD_DIM], origin[HEAD_DIM];  // code = value * inverse + origin - MAGIC
};

// Lowest and highest value of each channel among live tokens first .. end - 1 of one head, into
// `shared`; infinities the wrong way round if there is none. Ends with a barrier.
template <int HEAD_DIM, Dtype DTYPE>
__device__ void find_ranges(const Values& p, int batch, int head, int first, int end,
                            ValueChannels<HEAD_DIM>& shared) {
  constexpr int OCTETS = HEAD_DIM / 8;
  constexpr int ROWS = VALUE_THREADS / OCTETS;  // of threads; each takes every ROWS-th token
  constexpr int AHEAD = DTYPE == F32 ? 4 : 8;   // tokens whose loads are under way at a time
  __shared__ float rows[2][ROWS][HEAD_DIM];
  const int octet = threadIdx.x % OCTETS, row = threadIdx.x / OCTETS;
  OctetRange<DTYPE> range;
  if (row < ROWS && 8 * octet < p.head_dim) {
    visit_tokens<DTYPE, ROWS, AHEAD>(p.v, p.live, batch, head, first, end, row, 8 * octet,
                                     [&](const Octet<DTYPE>& values) { range.include(values); });
  }

  if (row < ROWS) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      rows[0][row][8 * octet + i] = range.low[i];
      rows[1][row][8 * octet + i] = range.high[i];
    }
  }
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float low = rows[0][0][threadIdx.x], high = rows[1][0][threadIdx.x];
    for (int r = 1; r < ROWS; ++r) {
      low = min_nan(low, rows[0][r][threadIdx.x]);
      high = max_nan(high, rows[1][r][threadIdx.x]);
    }
    shared.low[threadIdx.x] = low, shared.high[threadIdx.x] = high;
  }
  __syncthreads();
}

// The same for all tokens, from what was found in chunks of them.
template <int HEAD_DIM>
__device__ void join_ranges(const Values& p, s64 kv_head, ValueChannels<HEAD_DIM>& shared) {
  if (threadIdx.x < HEAD_DIM) {
    const float* ranges = p.ranges + kv_head * p.chunks * 2 * HEAD_DIM + threadIdx.x;
    float low = ranges[0], high = ranges[HEAD_DIM];
#pragma unroll 4
    for (int chunk = 1; chunk < p.chunks; ++chunk) {
      low = min_nan(low, ranges[chunk * 2 * HEAD_DIM]);
      high = max_nan(high, ranges[(chunk * 2 + 1) * HEAD_DIM]);
    }
    shared.low[threadIdx.x] = low, shared.high[threadIdx.x] = high;
  }
  __syncthreads();
}

// Each channel's scale and offset from its range. Ends with a barrier.
template <int HEAD_DIM>
__device__ void choose_scales(const Values& p, s64 kv_head, bool writes,
                              ValueChannels<HEAD_DIM>& shared) {
  if (threadIdx.x < HEAD_DIM) {
    float low = shared.low[threadIdx.x], high = shared.high[threadIdx.x];
    if (low > high) low = high = 0.0f;  // no live token
    const float middle = 0.5f * low + 0.5f * high;
    float half = max_nan(0.5f * high - 0.5f * low, SMALLEST_RANGE);
    // The offset is a whole number of codes and must fit beside MAGIC.
    half = max_nan(half, fabsf(middle) * (HALF_RANGE / (MAGIC_RANGE / 2)));
    const float inverse = HALF_RANGE / half, scale = half * (1.0f / HALF_RANGE);
    const float offset = rintf(middle * inverse) - MIDDLE_CODE;
    shared.inverse[threadIdx.x] = inverse, shared.origin[threadIdx.x] = MAGIC - offset;
    if (writes) {
      float* channels = p.channels + kv_head * 2 * HEAD_DIM + threadIdx.x;
      channels[0] = scale, channels[HEAD_DIM] = offset * scale;
    }
  }
  __syncthreads();
}

// The codes of VALUE_TOKENS tokens. A warp takes 32 keys x 32 channels at a time.
template <int HEAD_DIM, Dtype DTYPE>
__device__ void pack_values(const Values& p, int batch, int head, s64 kv_head, int part,
                            const ValueChannels<HEAD_DIM>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int four = lane % 8 * 4, octet = lane / 8 * 8;  // this lane's 4 keys and 8 channels
  const int panels = min(VALUE_TOKENS / 32, p.blocks * (BLOCK_KEYS / 32) - part * (VALUE_TOKENS / 32));
  for (int unit = warp; unit < panels * (HEAD_DIM / 32); unit += VALUE_THREADS / 32) {
    const int panel = part * (VALUE_TOKENS / 32) + unit / (HEAD_DIM / 32);
    const int channel = unit % (HEAD_DIM / 32) * 32 + octet;
    int keys[4];
    bool taken[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keys[i] = panel * 32 + four + i;
      taken[i] = keys[i] < p.kv_len && channel < p.head_dim;
    }
    p.live.narrow(taken, batch, head, keys);
    Octet<DTYPE> octets[4];
    const char* from = p.v.token<DTYPE>(batch, head, keys[0]) + channel * ELEMENT_BYTES<DTYPE>;
#pragma unroll
    for (int i = 0; i < 4; ++i, from += p.v.token_stride * ELEMENT_BYTES<DTYPE>) {
      octets[i].clear();
      if (taken[i]) octets[i].load(from);
    }
    u8* codes = p.codes + (kv_head * p.blocks * (BLOCK_KEYS / 32) + panel) * (HEAD_DIM * 32);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float inverse = shared.inverse[channel + e], origin = shared.origin[channel + e];
      u32 b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = round_to_byte(octets[i][e], inverse, origin);
      *reinterpret_cast<u32*>(codes + panel_offset(channel + e, four)) =
          pack_bytes(b[0], b[1], b[2], b[3]);
    }
  }
}

// Keeps 96 values alive with 64 registers per thread.
struct Params {
  float* x;
};

__global__ void __launch_bounds__(1024, 1) spilling(const __grid_constant__ Params p) {
  float kept[96];
  for (int i = 0; i < 96; ++i) kept[i] = p.x[i * 1024 + threadIdx.x];
#pragma unroll 1
  for (int round = 0; round < 9; ++round)
    for (int i = 0; i < 96; ++i) kept[i] = kept[i] * kept[(i + 7) % 96] + p.x[round];
  for (int i = 0; i < 96; ++i) p.x[i * 1024 + threadIdx.x] = kept[i];
}

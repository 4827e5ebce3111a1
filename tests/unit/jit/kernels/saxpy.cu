// A small kernel with everything the build has to handle: an include, template arguments, static and
// dynamic shared memory, the special function unit.
#include "words.cuh"

struct Params {
  const float* x;
  float* y;
  u64 n;
  float a;
};

template <int STEPS, bool RELU>
__global__ void __launch_bounds__(128, 2) saxpy(const __grid_constant__ Params p) {
  extern __shared__ float rows[];
  __shared__ float factor[32];
  u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x;
  if (i >= p.n) return;
  rows[threadIdx.x] = p.x[i];
  factor[threadIdx.x % 32] = p.a;
  __syncthreads();
  float y = p.y[i];
  for (int step = 0; step < STEPS; ++step) y += factor[step] * rows[threadIdx.x] * exp2f(y);
  p.y[i] = RELU && y < 0 ? 0 : y;
}

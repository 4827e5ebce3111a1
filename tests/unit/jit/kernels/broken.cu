// Does not compile; the comment and the name are not ASCII: größe, 大小.
struct Params {
  float* x;
};

__global__ void broken(const __grid_constant__ Params p) { größe = 1; }

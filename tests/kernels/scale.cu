// Small kernels in the style of the project for the compiler's tests.
#include <cuda_bf16.h>

#include "scale.cuh"

namespace cuflash::test {

template <class T, int kSteps>
__global__ void __launch_bounds__(128, 1) scale(T* x, float factor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  x[i] = static_cast<T>(chain<kSteps>(static_cast<float>(x[i]), factor));
}

// Holds kCount values at once: spills when kBlocks of 1024 threads leave too few registers.
template <int kCount, int kBlocks>
__global__ void __launch_bounds__(1024, kBlocks) hold(float* x) {
  __shared__ float shared[1024];
  float held[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) held[i] = x[i * 1024 + threadIdx.x];
  shared[threadIdx.x] = held[0];
  __syncthreads();
  const float other = shared[1023 - threadIdx.x];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i * 1024 + threadIdx.x] = __fmul_rn(held[i], other);
}

// setmaxnreg without a second argument to __launch_bounds__: ptxas drops it and says so.
template <int kRegisters>
__global__ void __launch_bounds__(128) give_back(float* x) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  x[threadIdx.x] = 1.0f;
}

}  // namespace cuflash::test

// What the kernel of the compiler's tests includes: editing it must invalidate the cache.
#pragma once

namespace cuflash::test {

template <int kSteps>
__device__ __forceinline__ float chain(float x, float factor) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) x = __fmaf_rn(x, factor, x);
  return x;
}

}  // namespace cuflash::test

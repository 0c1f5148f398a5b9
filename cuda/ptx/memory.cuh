// Global memory that other CTAs read and write at the same time: flags in their order, data past
// L1.
#pragma once

#include "ptx/types.cuh"

namespace cuflash::ptx {

__device__ __forceinline__ i32 ld_relaxed_gpu(const i32* from) {
  i32 x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

__device__ __forceinline__ void st_release_gpu(i32* to, i32 x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// After a relaxed load: it acquires. Without a wait for this thread's own stores where there is
// such a fence.
__device__ __forceinline__ void fence_acquire_gpu() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

__device__ __forceinline__ float4 ld_cg(const float4* from) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ void st_cg(float4* to, float4 x) {
  asm volatile("st.global.cg.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

}  // namespace cuflash::ptx

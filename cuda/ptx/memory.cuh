// Global memory: sixteen bytes at once; and what other CTAs read and write at the same time, flags
// in their order, data past L1.
#pragma once

#include "ptx/types.cuh"

namespace cuflash::ptx {

__device__ __forceinline__ void st_global_v4(void* to, const u32 (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
               :
               : "l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

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

__device__ __forceinline__ float ld_cg(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}

__device__ __forceinline__ void st_cg(float* to, float x) {
  asm volatile("st.global.cg.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

// Each of the four floats is added on its own, rounded to nearest, subnormals flushed.
__device__ __forceinline__ void red_add_v4(float* to, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x), "f"(y),
               "f"(z), "f"(w)
               : "memory");
}

__device__ __forceinline__ float ld_shared_f32(u32 from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ float2 ld_shared_v2(u32 from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void st_shared_v4(u32 to, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

}  // namespace cuflash::ptx

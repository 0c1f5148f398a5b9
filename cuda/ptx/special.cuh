// Special registers, read anew at every call: what is computed from them is not kept in registers
// across a loop.
#pragma once

#include "ptx/types.cuh"

namespace cuflash::ptx {

__device__ __forceinline__ u32 thread_index() {
  u32 t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t)::"memory");
  return t;
}

// The same number, of which the compiler does not know that: what is worked out from it is worked
// out here, and not kept in registers from an earlier place.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x)::"memory");
  return x;
}

__device__ __forceinline__ i32 block_index() {
  i32 b;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b)::"memory");
  return b;
}

// x, of which the compiler knows nothing any more: what is computed from it again is computed anew.
__device__ __forceinline__ i32 opaque(i32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// x, hidden from the compiler: it keeps the value instead of computing it again where it is used.
__device__ __forceinline__ u32 kept(u32 x) { return __shfl_xor_sync(0xffffffffu, x, 0); }

}  // namespace cuflash::ptx

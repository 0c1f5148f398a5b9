// stmatrix: four 8 x 8 tiles of halves to shared memory, one row address per lane.
#pragma once

#include "ptx/types.cuh"

namespace cuflash::ptx {

__device__ __forceinline__ void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               :
               : "r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Each tile transposed.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               :
               : "r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace cuflash::ptx

// Temporary: when the products of a step are issued and done, in clocks from the step's start.
#include "ptx/barrier.cuh"
#include "ptx/special.cuh"
#include "sm90/products.cuh"

namespace cuflash::sm90 {

__device__ __forceinline__ u32 clock_now() {
  u32 t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
  return t;
}

// Of every warpgroup's first thread: clocks after each product of S, each of O, wait<1>, wait<0>.
template <class S, bool kHeldQ>
__global__ void __launch_bounds__(S::kD == 64 ? 384 : 256, 1) probe(u32* times, i32 steps) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = ptx::shared_address(shared);
  for (int i = threadIdx.x; i < 200 * 1024 / 4; i += blockDim.x) ptx::st_shared(base + 4 * i, 0);
  ptx::fence_proxy_async();
  __syncthreads();
  float s[2][S::kGroups][2], o[2][S::kDv / 8][2];
  u32 p[S::kGroups / 2][4], held[S::kD / 16][4];
  for (int i = 0; i < 4 * S::kGroups; ++i) (&s[0][0][0])[i] = 0.0f;
  for (int i = 0; i < S::kDv / 2; ++i) (&o[0][0][0])[i] = 0.0f;
  for (int i = 0; i < 2 * S::kGroups; ++i) p[i / 4][i % 4] = 0;
  for (int i = 0; i < S::kD / 4; ++i) held[i / 4][i % 4] = 0;
  constexpr int kS = S::kD / 16, kO = S::kBlockN / 16;
  u32 at[kS + kO + 3];
  const u32 warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / 128, 0);
  const u32 q = base + warpgroup * S::Q::kBytes, k = base + 3 * S::Q::kBytes, v = k + S::K::kBytes;
#pragma unroll 1
  for (i32 i = 0; i < steps; ++i) {
    ptx::fence_operands(s);
    ptx::fence_operands(o);
    ptx::fence_operands(p);
    at[0] = clock_now();
    ptx::wgmma_fence();
    const u32 a = ptx::opaque(descriptor(q, 16)), b = ptx::opaque(descriptor(k, 16));
#pragma unroll
    for (int kk = 0; kk < kS; ++kk) {
      const u32 a_step = (kk / 4 * S::Q::kPanelBytes + kk % 4 * 32) / 16,
                b_step = (kk / 4 * S::K::kPanelBytes + kk % 4 * 32) / 16;
      if constexpr (kHeldQ) {
        ptx::Wgmma<S::kBlockN>::template rs_k<S::kBf16, 0>(s, held[kk], whole(b + b_step), kk > 0);
      } else {
        ptx::Wgmma<S::kBlockN>::template ss<S::kBf16, 0>(s, whole(a + a_step), whole(b + b_step),
                                                         kk > 0);
      }
      at[1 + kk] = clock_now();
    }
    ptx::wgmma_commit_group();
    const u32 c = ptx::opaque(descriptor(v, S::V::kPanelBytes));
#pragma unroll
    for (int kk = 0; kk < kO; ++kk) {
      ptx::Wgmma<S::kDv>::template rs<S::kBf16, 0>(o, p[kk], whole(c + kk * 16 * kPanelPitch / 16));
      at[1 + kS + kk] = clock_now();
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(s);
    at[1 + kS + kO] = clock_now();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(o);
    ptx::fence_operands(p);
    at[2 + kS + kO] = clock_now();
  }
  float sum = 0.0f;
  for (int i = 0; i < 4 * S::kGroups; ++i) sum += (&s[0][0][0])[i];
  for (int i = 0; i < S::kDv / 2; ++i) sum += (&o[0][0][0])[i];
  if (threadIdx.x % 128 == 0) {
    for (int i = 0; i < kS + kO + 3; ++i) times[warpgroup * 64 + i] = at[i] - at[0];
    times[warpgroup * 64 + 63] = sum == 1.0f;
  }
}

}  // namespace cuflash::sm90

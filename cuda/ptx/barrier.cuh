// Named barriers of a CTA, the barrier of a cluster, fences between the generic and the async
// proxy, and the register pool of warpgroups.
#pragma once

#include "ptx/types.cuh"

namespace cuflash::ptx {

__device__ __forceinline__ void bar_sync(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

// Whether `x` holds for any thread of the barrier.
__device__ __forceinline__ bool bar_red_or(u32 barrier, u32 threads, bool x) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(static_cast<u32>(x)), "r"(barrier), "r"(threads)
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void barrier_cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_ctarank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address in CTA `rank` of what lies at `address` here.
__device__ __forceinline__ u32 mapa(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void st_shared_cluster(u32 address, i32 x) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" : : "r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared(u32 address, i32 x) {
  asm volatile("st.shared.s32 [%0], %1;" : : "r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ i32 ld_shared(u32 address) {
  i32 x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for all memory.
__device__ __forceinline__ void fence_proxy_async_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

}  // namespace cuflash::ptx

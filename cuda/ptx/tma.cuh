// cp.async.bulk.tensor: boxes of a 4-D tensor (column, row, head, batch) between global and shared
// memory, by one thread. What lies outside the tensor reads as 0 and is not written.
#pragma once

#include "ptx/types.cuh"

namespace cuflash::ptx {

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

__device__ __forceinline__ void tma_load_4d(u32 to, const TensorMap& map, u32 barrier, i32 column,
                                            i32 row, i32 head, i32 batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// The same box to the same place of every CTA in `ctas`, and its bytes to their barriers.
__device__ __forceinline__ void tma_load_4d_multicast(u32 to, const TensorMap& map, u32 barrier,
                                                      i32 column, i32 row, i32 head, i32 batch,
                                                      u16 ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      :
      : "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(ctas)
      : "memory");
}

__device__ __forceinline__ void tma_store_4d(u32 from, const TensorMap& map, i32 column, i32 row,
                                             i32 head, i32 batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];"
               :
               : "r"(from), "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Contiguous bytes, a multiple of 16: to shared memory, to global memory, and added there as floats
// (rounded to nearest; subnormals are kept, unlike in other additions in global memory: measured).
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(to), "r"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_add_f32(void* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// Waits until the stores have been made.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" : : "n"(kPending) : "memory");
}

// Waits until the stores' sources have been read.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kPending) : "memory");
}

}  // namespace cuflash::ptx

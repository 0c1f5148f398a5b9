// In which order a tile of keys takes the blocks of rows that see it.
#pragma once

#include "ptx/types.cuh"

namespace cuflash {

// Blocks [begin, end): from the first of each aligned `run` (a power of two) to its last, run after
// run from the last one to the first. A run that holds them all takes them in ascending order.
struct Blocks {
  static constexpr i32 kAscending = 1 << 30;
  i32 begin, end, run;

  __device__ __forceinline__ i32 first() const { return max((end - 1) & -run, begin); }

  // The i-th.
  __device__ __forceinline__ i32 at(i32 i) const {
    const i32 top = first();
    if (i < end - top) return top + i;
    const i32 rest = i - (end - top);
    return max((top & -run) - run - (rest & -run), begin) + (rest & (run - 1));
  }

  // To the block behind this one; to the first one again, and true, behind the last.
  __device__ __forceinline__ bool next(i32& block) const {
    const i32 start = block & -run;
    if (++block < end && (block & (run - 1)) != 0) return false;
    const bool last = start <= begin;
    block = last ? first() : max(start - run, begin);
    return last;
  }
};

}  // namespace cuflash

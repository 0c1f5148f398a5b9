// Where things are: strides of a tensor, and the band of keys [low, high) that a row sees: every
// mask (causal, window, alignment) in two integers; of a tile, as one bit for each element.
#pragma once

#include "ptx/types.cuh"

namespace cuflash {

struct Strides {
  i64 batch, head, row;  // in elements; the last axis is contiguous

  __device__ __forceinline__ i64 at(i32 b, i32 h, i32 r = 0) const {
    return b * batch + h * head + r * row;
  }
};

struct Band {
  i32 n_q, n_k;
  i32 diagonal;     // key under the diagonal of query 0
  i32 left, right;  // keys to either side of the diagonal; INT_MAX: unbounded

  __device__ __forceinline__ i32 low(i32 row) const {
    const i64 first = static_cast<i64>(row) + diagonal - left;
    return first > 0 ? (first < n_k ? static_cast<i32>(first) : n_k) : 0;
  }
  __device__ __forceinline__ i32 high(i32 row) const {
    const i64 end = static_cast<i64>(row) + diagonal + right + 1;
    return end < n_k ? (end > 0 ? static_cast<i32>(end) : 0) : n_k;
  }
  // The same bounds relative to `key`, as row + i sees them at + i: not cut to [0, n_k), but
  // brought within 2^30, where 32 bits and the sides of a tile are safe.
  __device__ __forceinline__ i32 low_from(i32 row, i32 key) const {
    return near(static_cast<i64>(row) + diagonal - left - key);
  }
  __device__ __forceinline__ i32 high_from(i32 row, i32 key) const {
    return near(static_cast<i64>(row) + diagonal + right + 1 - key);
  }

 private:
  __device__ __forceinline__ static i32 near(i64 x) {
    constexpr i64 kFar = 1 << 30;
    return static_cast<i32>(x > kFar ? kFar : (x < -kFar ? -kFar : x));
  }
};

// Which of a thread's columns of an accumulator lie in [low, high): its columns are 8 j + e, j <
// kGroups, e < 2, and the bounds are relative to the first. Bit 2 j + e, 32 of them to a word: a
// test of a bit is a predicate, and those of many come with one instruction.
template <int kGroups>
struct SeenColumns {
  static constexpr int kWords = (2 * kGroups + 31) / 32;
  u32 words[kWords];

  __device__ __forceinline__ static SeenColumns of(i32 low, i32 high) {
    const i32 skipped = below(low), end = below(high);
    SeenColumns seen;
#pragma unroll
    for (int i = 0; i < kWords; ++i) seen.words[i] = from(skipped, i) & ~from(end, i);
    return seen;
  }

  __device__ __forceinline__ bool seen(int j, int e) const {
    return words[j / 16] >> (j % 16 * 2 + e) & 1;
  }

 private:
  // How many of the columns, were there no end to them, lie below x.
  __device__ __forceinline__ static i32 below(i32 x) {
    x = max(x, 0);
    return (x + 7) / 8 + (x + 6) / 8;
  }
  // Word i of ones from bit n on. The shift stops at 32.
  __device__ __forceinline__ static u32 from(i32 n, int i) {
    return __funnelshift_lc(0u, ~0u, static_cast<u32>(i == 0 ? n : max(n - 32 * i, 0)));
  }
};

}  // namespace cuflash

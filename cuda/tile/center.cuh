// Centred dQ (emulation/center.py): of a row, the keys that its mean is of; of a block of rows, the
// kinds that differ by them. center: of BackwardPlan, the keys of a group.
#pragma once

#include "tile/band.cuh"
#include "tile/numerics.cuh"

namespace cuflash {

constexpr int kSamples = 16;
constexpr float kOfSamples = 0.5f / kSamples;  // what c is of their sum
constexpr float kThreshold = 0.5f;             // THRESHOLD of emulation/center.py

// The whole groups of keys that a row sees: none of length 0.
struct Groups {
  i32 first, length;

  __device__ __forceinline__ static Groups of(const Band& band, i32 row, u32 center) {
    const u32 first = (static_cast<u32>(band.low(row)) + center - 1) / center * center;
    const i32 length = static_cast<u32>(band.high(row)) / center * center - first;
    if (length <= 0) return {0, 0};
    return {static_cast<i32>(first), length};
  }

  __device__ __forceinline__ bool operator!=(const Groups& other) const {
    return first != other.first || length != other.length;
  }

  // first + (2 t + 1) length / 32, rounded down, without overflow.
  __device__ __forceinline__ i32 sample(int t) const {
    const i32 odd = 2 * t + 1;
    return first + odd * (length / (2 * kSamples)) + odd * (length % (2 * kSamples)) / 32;
  }

  // Two columns of c, of a row that sees some group. keys: those columns of key 0.
  template <class Half>
  __device__ __forceinline__ float2 mean(const u16* keys, i64 row_stride) const {
    static_assert(kSamples == 16, "sample divides by 32");
    u32 x[kSamples];
#pragma unroll
    for (int t = 0; t < kSamples; ++t)
      x[t] = *reinterpret_cast<const u32*>(keys + sample(t) * row_stride);
    float2 sum = make_float2(low_half<Half>(x[0]), high_half<Half>(x[0]));
#pragma unroll
    for (int t = 1; t < kSamples; ++t)
      sum = make_float2(__fadd_rn(sum.x, low_half<Half>(x[t])),
                        __fadd_rn(sum.y, high_half<Half>(x[t])));
    return make_float2(__fmul_rn(sum.x, kOfSamples), __fmul_rn(sum.y, kOfSamples));
  }
};

// Which rows of a key head are centred (sm80/chosen_rows.cuh): a bit for each.
struct Centered {
  const u32* words;

  template <class Params>
  __device__ __forceinline__ static Centered of(const Params& params, i32 batch, i32 kv_head) {
    const i64 head = batch * (params.heads / params.group) + kv_head;
    return {params.centered + head * (params.pitch / 32)};
  }

  __device__ __forceinline__ bool row(i32 row) const {
    return (words[row / 32] >> row % 32 & 1) != 0;
  }

  // Whether some row of a block is.
  template <int kRows>
  __device__ __forceinline__ bool any(i32 first_row) const {
    static_assert(kRows == 16 || kRows % 32 == 0, "whole words");
    if constexpr (kRows == 16) return (words[first_row / 32] >> first_row % 32 & 0xffff) != 0;
    u32 bits = 0;
#pragma unroll
    for (int w = 0; w < kRows / 32; ++w) bits |= words[first_row / 32 + w];
    return bits != 0;
  }
};

// Rows of a block in runs with the same groups, which both ends of the band only raise.
template <int kRows>
struct Kinds {
  // A group is of 16 keys or more.
  static constexpr int kMost = 1 + 2 * ((kRows + 14) / 16), kWords = (kRows + 31) / 32;
  u32 starts[kWords];  // bits of the rows with which a run begins

  // By whole warps.
  __device__ __forceinline__ Kinds(const Band& band, i32 first_row, u32 center) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const i32 m = 32 * w + lane, row = first_row + m;
      const bool other = Groups::of(band, row, center) != Groups::of(band, row - 1, center);
      starts[w] = __ballot_sync(0xffffffffu, m == 0 || (other && m < kRows));
    }
  }

  __device__ __forceinline__ int count() const {
    int n = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) n += __popc(starts[w]);
    return n;
  }

  // The kind of row m of the block.
  __device__ __forceinline__ int of(int m) const {
    int kind = -1;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int last = min(m - 32 * w, 31);
      if (last >= 0) kind += __popc(starts[w] << (31 - last));
    }
    return kind;
  }

  // The first row of a kind.
  __device__ __forceinline__ int row(int kind) const {
    int found = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int n = __popc(starts[w]);
      if (kind >= 0 && kind < n) {
        u32 bits = starts[w];
#pragma unroll 1
        for (int i = 0; i < kind; ++i) bits &= bits - 1;
        found = 32 * w + __ffs(bits) - 1;
      }
      kind -= n;
    }
    return found;
  }
};

}  // namespace cuflash

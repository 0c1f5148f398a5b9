// NaN and Inf behind a mask: 0 * NaN would carry them into rows that do not see them. A partly
// masked tile that holds such values is cleaned in shared memory before the product, and rows that
// do see one get it afterwards, out of global memory.
#pragma once

#include "tile/band.cuh"
#include "tile/layout.cuh"
#include "tile/numerics.cuh"

namespace cuflash {

// Whether this thread's share of a tile holds NaN or Inf: an exponent of all ones carries into the
// sign's place.
template <class Half, class T, int kThreads>
__device__ __forceinline__ bool holds_nonfinite(const char* tile) {
  constexpr int kChunks = T::kCols / 8;
  constexpr u32 kExponents = Half::kExponent << 16 | Half::kExponent;
  constexpr u32 kOneMore = (Half::kExponent & (0u - Half::kExponent)) * 0x10001u;
  u32 carries = 0;
#pragma unroll 4
  for (int i = ptx::thread_index() % kThreads; i < T::kRows * kChunks; i += kThreads) {
    const uint4 x =
        *reinterpret_cast<const uint4*>(tile + i / kChunks * T::kPitch + i % kChunks * 16);
    carries |= ((x.x & kExponents) + kOneMore) | ((x.y & kExponents) + kOneMore);
    carries |= ((x.z & kExponents) + kOneMore) | ((x.w & kExponents) + kOneMore);
  }
  return (carries & 0x80008000u) != 0;
}

// NaN and Inf of this thread's share become 0; true if there were any.
template <class Half, class T, int kThreads>
__device__ __forceinline__ bool zero_nonfinite(char* tile) {
  constexpr int kChunks = T::kCols / 8;
  bool found = false;
#pragma unroll 1
  for (int i = ptx::thread_index() % kThreads; i < T::kRows * kChunks * 4; i += kThreads) {
    u32* pair = reinterpret_cast<u32*>(tile + i / 4 / kChunks * T::kPitch + i / 4 % kChunks * 16 +
                                       i % 4 * 4);
    const u32 x = *pair;
    u32 y = x;
    if ((x & Half::kExponent) == Half::kExponent) y &= 0xffff0000u;
    if ((x >> 16 & Half::kExponent) == Half::kExponent) y &= 0x0000ffffu;
    if (x != y) *pair = y;
    found |= x != y;
  }
  return found;
}

// The same in one pass over a tile whose layout does not matter: true if this thread found any.
template <class Half, int kBytes, int kThreads>
__device__ __forceinline__ bool clear_nonfinite(char* tile, int thread) {
  bool found = false;
#pragma unroll 4
  for (int i = thread; i < kBytes / 16; i += kThreads) {
    uint4* at = reinterpret_cast<uint4*>(tile) + i;
    const uint4 x = *at;
    constexpr u32 kExponents = Half::kExponent << 16 | Half::kExponent;
    constexpr u32 kOneMore = (Half::kExponent & (0u - Half::kExponent)) * 0x10001u;
    const u32 carries = ((x.x & kExponents) + kOneMore) | ((x.y & kExponents) + kOneMore) |
                        ((x.z & kExponents) + kOneMore) | ((x.w & kExponents) + kOneMore);
    if ((carries & 0x80008000u) == 0) continue;
    found = true;
    u16* halves = reinterpret_cast<u16*>(at);
#pragma unroll 1
    for (int e = 0; e < 8; ++e) {
      if ((halves[e] & Half::kExponent) == Half::kExponent) halves[e] = 0;
    }
  }
  return found;
}

// The sum of the NaN and Inf of one column of V that a row sees outside the keys [full_begin,
// full_end): 0 if there are none.
template <class Half>
__device__ __forceinline__ float visible_special(const Band& band, const u16* column,
                                                 i64 row_stride, i32 row, i32 full_begin,
                                                 i32 full_end) {
  float special = 0.0f;
#pragma unroll 1
  for (i32 key = band.low(row); key < band.high(row); ++key) {
    if (key >= full_begin && key < full_end) continue;
    const u16 x = column[key * row_stride];
    if ((x & Half::kExponent) == Half::kExponent) special = __fadd_rn(special, Half::widen(x));
  }
  return special;
}

}  // namespace cuflash

// NaN and Inf behind a mask: 0 * NaN would carry them into rows that do not see them. A partly masked tile that holds
// such values is cleaned in shared memory before the product, its special values are kept in a map of two bits each, and
// rows that do see one get it afterwards.
#pragma once

#include "tile/layout.cuh"
#include "tile/numerics.cuh"

namespace cuflash {

constexpr u32 kIsNaN = 3, kIsPositive = 1, kIsNegative = 2;  // 0: finite

// One 16-bit word of the map holds the eight values of a 16-byte chunk.
template <class T>
struct SpecialMap {
  static constexpr int kChunks = T::kCols / 8;
  static constexpr int kBytes = T::kRows * kChunks * 2;
};

// Cleans this thread's share of a tile and fills the map; true if it held NaN or Inf.
template <class Half, class T, int kThreads>
__device__ __forceinline__ bool sanitise(char* tile, u16* map) {
  constexpr int kChunks = SpecialMap<T>::kChunks;
  bool found = false;
#pragma unroll 1
  for (int i = threadIdx.x; i < T::kRows * kChunks; i += kThreads) {
    u16* chunk = reinterpret_cast<u16*>(tile + i / kChunks * T::kPitch + i % kChunks * 16);
    u32 kinds = 0;
#pragma unroll 1
    for (int e = 0; e < 8; ++e) {
      const u32 x = chunk[e];
      if ((x & Half::kExponent) != Half::kExponent) continue;
      const bool infinite = (x & 0x7fffu) == Half::kExponent;
      kinds |= (infinite ? (x >> 15 ? kIsNegative : kIsPositive) : kIsNaN) << (2 * e);
      chunk[e] = 0;
    }
    map[i] = static_cast<u16>(kinds);
    found |= kinds != 0;
  }
  return found;
}

// x plus the special values of one column that keys [low, high) of the tile hold. (Under a weight that underflowed to
// zero, too: there the product would be NaN.)
template <class T>
__device__ __noinline__ float with_specials(float x, const u16* map, int column, i32 low, i32 high) {
  u32 positive = 0, negative = 0;
#pragma unroll 1
  for (i32 key = low > 0 ? low : 0; key < (high < T::kRows ? high : T::kRows); ++key) {
    const u32 kind = map[key * SpecialMap<T>::kChunks + column / 8] >> (2 * (column % 8)) & 3u;
    positive |= kind & 1u;
    negative |= kind >> 1;
  }
  if (positive && negative) return __int_as_float(0x7fffffff);
  const float infinity = __int_as_float(0x7f800000);
  return positive ? __fadd_rn(x, infinity) : negative ? __fadd_rn(x, -infinity) : x;
}

}  // namespace cuflash

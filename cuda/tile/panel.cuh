// Tiles of halves as TMA writes them and wgmma reads them: panels of 64 columns, a row of a panel
// 128 bytes, its eight 16-byte chunks permuted by the row (the 128-byte swizzle). Panels begin at
// multiples of 1024 bytes.
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/types.cuh"

namespace cuflash {

constexpr int kPanelCols = 64, kPanelPitch = 128;

__host__ __device__ constexpr u32 max_bytes(u32 a, u32 b) { return a > b ? a : b; }

template <int kRows_, int kCols_>
struct Panels {
  static_assert(kRows_ % 8 == 0, "the swizzle repeats every eight rows");
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kCount = (kCols + kPanelCols - 1) / kPanelCols;
  static constexpr int kPanelBytes = kRows * kPanelPitch;
  static constexpr int kBytes = kCount * kPanelBytes;

  // Offset of the chunk of eight columns that holds (row, column).
  __device__ __forceinline__ static u32 chunk(int row, int column) {
    return column / kPanelCols * kPanelBytes + row * kPanelPitch +
           ((column % kPanelCols / 8) ^ (row % 8)) * 16;
  }
};

// A wgmma operand is 64 bits: address (without the rank that clusters add to it) and step between
// panels in units of 16 bytes, the step between groups of eight rows, the kind of swizzle. The
// lower half varies; the step along k is added to it.
__device__ __forceinline__ u32 descriptor(u32 address, u32 panel_bytes) {
  return (address & 0x3ffff) / 16 | panel_bytes / 16 << 16;
}

__device__ __forceinline__ u64 whole(u32 descriptor) {
  constexpr u64 kGroup = 8 * kPanelPitch / 16, kSwizzle128 = 1;
  return kSwizzle128 << 62 | kGroup << 32 | descriptor;
}

}  // namespace cuflash

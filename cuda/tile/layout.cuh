// Tiles of halves in shared memory: rows padded by 16 bytes, so that eight rows of ldmatrix fall
// into different banks.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/special.cuh"

namespace cuflash {

template <int kRows_, int kCols_>
struct Tile {
  static_assert(kCols_ % 16 == 0,
                "an odd number of 16-byte chunks per padded row needs kCols % 16 == 0");
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kPitch = (kCols + 8) * 2;  // bytes
  static constexpr int kBytes = kRows * kPitch;
};

// Rows [first, first + kRows) of a matrix of halves; rows outside [low, high) and columns past
// `cols` become 0.
template <class T, int kThreads>
__device__ __forceinline__ void load_tile(u32 to, const u16* from, i64 row_stride, i32 first,
                                          i32 low, i32 high, i32 cols) {
  constexpr int kChunks = T::kCols / 8;
  if constexpr (kThreads % kChunks == 0) {
    // A thread keeps its column: one address and one step, instead of one address per row.
    constexpr int kStep = kThreads / kChunks;
    const int thread = ptx::thread_index();
    const int chunk = thread % kChunks, row = thread / kChunks;
    const bool inside = chunk * 8 < cols;
    const u16* source = from + (first + row) * row_stride + chunk * 8;
    to += row * T::kPitch + chunk * 16;
#pragma unroll 4
    for (int i = 0; i < T::kRows; i += kStep) {
      if (T::kRows % kStep != 0 && row + i >= T::kRows) break;
      const i32 at = first + row + i;
      const bool valid = inside && at >= low && at < high;
      ptx::cp_async_16(to + i * T::kPitch, valid ? source : from, valid);
      source += kStep * row_stride;
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < T::kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool valid = first + row >= low && first + row < high && chunk * 8 < cols;
      const u16* source = from + (valid ? (first + row) * row_stride + chunk * 8 : 0);
      ptx::cp_async_16(to + row * T::kPitch + chunk * 16, source, valid);
    }
  }
}

// Address of this lane for the A operand (16 x 16 at row, column) and for B = rows of K (two n8
// blocks x k16).
template <class T>
__device__ __forceinline__ u32 a_address(u32 base, int row, int column) {
  const int lane = threadIdx.x % 32;
  return base + (row + lane % 16) * T::kPitch + (column + lane / 16 * 8) * 2;
}

template <class T>
__device__ __forceinline__ u32 b_address(u32 base, int row, int column) {
  const int lane = threadIdx.x % 32;
  return base + (row + lane % 8 + lane / 16 * 8) * T::kPitch + (column + lane / 8 % 2 * 8) * 2;
}

// For ldmatrix.trans: B = a tile stored [k][n], k16 at `row`, two n8 blocks at `column`.
template <class T>
__device__ __forceinline__ u32 bt_address(u32 base, int row, int column) {
  const int lane = threadIdx.x % 32;
  return base + (row + lane % 16) * T::kPitch + (column + lane / 16 * 8) * 2;
}

}  // namespace cuflash

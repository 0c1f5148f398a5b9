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

// Loads rows [first, first + kRows) of a matrix of halves; rows outside [low, high) and columns
// past `cols` become 0. A tile that exists whole is loaded in kPieces, so that its loads can be put
// between products: a burst of them would keep the products' own reads of shared memory waiting.
template <class T, int kThreads>
class TileLoad {
  static constexpr u32 kChunks = T::kCols / 8;
  // Whether a thread keeps its column: then a piece costs one addition.
  static constexpr bool kRegular = kThreads % kChunks == 0 && T::kRows % (kThreads / kChunks) == 0;
  static constexpr u32 kStep = kRegular ? kThreads / kChunks : T::kRows;

 public:
  static constexpr int kPieces = T::kRows / kStep;

  __device__ __forceinline__ TileLoad(u32 to, const u16* from, i64 row_stride, i32 first, i32 low,
                                      i32 high, i32 cols, bool wanted = true)
      : to_(to), from_(from), stride_(row_stride) {
    whole_ = kRegular && wanted && first >= low && first + T::kRows <= high && cols == T::kCols;
    if (whole_) {
      const u32 thread = ptx::thread_index() % kThreads, row = thread / kChunks,
                chunk = thread % kChunks;
      from_ += (first + row) * row_stride + chunk * 8;
      to_ += row * T::kPitch + chunk * 16;
      return;
    }
    if (!wanted) return;
#pragma unroll 1
    for (u32 i = ptx::thread_index() % kThreads; i < T::kRows * kChunks; i += kThreads) {
      const i32 row = first + static_cast<i32>(i / kChunks), chunk = i % kChunks;
      const bool valid = row >= low && row < high && chunk * 8 < cols;
      const u16* source = from + (valid ? row * row_stride + chunk * 8 : 0);
      ptx::cp_async_16(to + i / kChunks * T::kPitch + chunk * 16, source, valid);
    }
  }

  // In ascending order, each once.
  __device__ __forceinline__ void piece(int i) {
    if (!whole_) return;
    ptx::cp_async_16(to_ + i * kStep * T::kPitch, from_, true);
    from_ += kStep * stride_;
  }

  __device__ __forceinline__ void all() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) piece(i);
  }

 private:
  u32 to_;
  const u16* from_;
  i64 stride_;
  bool whole_;
};

template <class T, int kThreads>
__device__ __forceinline__ void load_tile(u32 to, const u16* from, i64 row_stride, i32 first,
                                          i32 low, i32 high, i32 cols) {
  TileLoad<T, kThreads> load(to, from, row_stride, first, low, high, cols);
#pragma unroll
  for (int i = 0; i < load.kPieces; ++i) load.piece(i);
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

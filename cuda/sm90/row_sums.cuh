// Sums of the rows of dS, for centred dQ (emulation/center.py): a tile times a column of ones, from
// zero, added in fp32 where and when the tile's share of dQ is. Up to 128 columns of the head a
// warpgroup makes them when it has stored its share; above one more warp does. Few registers are
// left for either: loops stay loops, and what follows from the thread's index is not kept.
#pragma once

#include "sm90/gradient.cuh"

namespace cuflash::sm90 {

// -- By a warpgroup -------------------------------------------------------------------------------

// Eight columns of 16 ones, without a swizzle: of eight, which are read twice.
constexpr u32 kOnesBytes = 128;

template <class Half>
__device__ __forceinline__ void write_ones(u32 to, int thread) {
  if (thread < static_cast<int>(kOnesBytes / 4))
    ptx::st_shared(to + 4 * thread, static_cast<i32>(Half::kOnes));
  ptx::fence_proxy_async();
}

// rows = A times ones: 64 rows of panels, kCols columns; ones: their address.
template <bool kBf16, class A, int kCols>
__device__ __forceinline__ void make_row_sums(Accumulator<1>& rows, u32 a, u32 ones) {
  constexpr u64 kGroup = kOnesBytes / 16;  // no second group of eight columns is there
  const u64 b = kGroup << 32 | descriptor(ones, 0);
  ptx::fence_operands(rows);
  ptx::wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kCols / 16; ++kk) {
    const u32 step = (kk / 4 * A::kPanelBytes + kk % 4 * 32) / 16;
    ptx::Wgmma<8>::template ss<kBf16, 0>(rows, whole(a + step), b, kk > 0);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::fence_operands(rows);
}

// Of a product's rows, of which kRows exist: 64, or 64 of each consumer warpgroup. All its columns
// are alike.
template <bool kBoth, int kRows>
__device__ __forceinline__ void store_row_sums(u32 to, const Accumulator<1>& rows) {
  const u32 thread = ptx::thread_index() - 128;
  const u32 row = (kBoth ? thread / 32 : thread / 32 % 4) * 16 + thread % 32 / 4;
  if (thread % 4 != 0 || row >= kRows) return;
  ptx::st_shared(to + 4 * row, __float_as_int(rows[0][0][0]));
  ptx::st_shared(to + 4 * (row + 8), __float_as_int(rows[1][0][0]));
}

// By the warp that adds the share. Empty unless kOn, and of a block without a centred row.
template <class S, bool kOn_>
struct RowShare {
  static constexpr bool kOn = kOn_;
  static constexpr int kCount = kOn ? S::kBlockM / 32 : 1;  // row j of a lane: 32 j + lane
  float r[kCount];
  bool any = false;  // whether some row of the block is centred

  __device__ __forceinline__ static int lane() { return ptx::thread_index() % 32; }

  __device__ __forceinline__ void take(u32 from) {
    any = true;
#pragma unroll
    for (int j = 0; j < kCount; ++j) r[j] = ptx::ld_shared_f32(from + 4 * (32 * j + lane()));
  }

  // first: nothing was added before.
  __device__ __forceinline__ void add(float* sums, bool first) const {
    sums += lane();
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      ptx::st_cg(sums + 32 * j, first ? r[j] : __fadd_rn(ptx::ld_cg(sums + 32 * j), r[j]));
  }
};

// -- By one warp ----------------------------------------------------------------------------------

// r[j] is of row 32 j + lane % 4 * 8 + lane / 4 of a block.
template <class S>
struct WarpRowSums {
  static constexpr int kCount = S::kBlockM / 32;
  float r[kCount], before[kCount];

  // Of a tile in shared memory. All columns of the product are alike; of the four lanes that have a
  // row's, one keeps it.
  __device__ __forceinline__ void sum(u32 tile) {
    using DS = typename S::DS;
    using Half = typename S::Half;
    __syncwarp();  // all lanes have waited
    const int lane = ptx::thread_index() % 32;
    const u32 from = tile + DS::chunk(lane % 16, lane / 16 * 8);
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      float x[2][2] = {};
#pragma unroll 2
      for (int kk = 0; kk < S::kBlockN / 16; ++kk) {
        // The swizzle moves a step of 32 bytes within a row of 128 as an exclusive or.
        u32 a[4];
        ptx::ldmatrix_x4(a, (from ^ kk % 4 * 32) + kk / 4 * DS::kPanelBytes + i * 16 * kPanelPitch);
        Half::mma(x[0][0], x[0][1], x[1][0], x[1][1], a, Half::kOnes, Half::kOnes);
      }
      const int mine = ptx::thread_index() % 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int eight = 2 * i + h;  // rows
        if (eight % 4 == 0 || mine == eight % 4) r[eight / 4] = x[h][0];
      }
    }
  }

  __device__ __forceinline__ static int row(int j) {
    const int lane = ptx::thread_index() % 32;
    return 32 * j + lane % 4 * 8 + lane / 4;
  }

  // What tiles before this one have added, asked for, when it is this tile's turn.
  __device__ __forceinline__ void fetch(const float* sums) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) before[j] = ptx::ld_cg(sums + row(j));
  }

  // first: nothing was added, and nothing has been fetched.
  __device__ __forceinline__ void store(float* sums, bool first) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      ptx::st_cg(sums + row(j), first ? r[j] : __fadd_rn(before[j], r[j]));
  }
};

}  // namespace cuflash::sm90

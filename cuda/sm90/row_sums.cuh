// Sums of the rows of dS, for centred dQ (emulation/center.py), by one warp: a tile times a column
// of ones, from zero, added in fp32 where and when the tile's share of dQ is. Registers are few:
// loops stay loops, and what follows from the thread's index is not kept.
#pragma once

#include "sm90/gradient.cuh"

namespace cuflash::sm90 {

// Empty unless kOn. r[j] is of row 32 j + lane % 4 * 8 + lane / 4 of a block. kTogether: blocks of
// 16 rows whose products run side by side.
template <class S, bool kOn_, int kTogether>
struct RowSums {
  static constexpr bool kOn = kOn_;
  static constexpr int kCount = kOn ? S::kBlockM / 32 : 1;
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
    for (int i = 0; i < 2 * kCount; i += kTogether) {
      float x[kTogether][2][2] = {};
#pragma unroll 2
      for (int kk = 0; kk < S::kBlockN / 16; ++kk) {
        // The swizzle moves a step of 32 bytes within a row of 128 as an exclusive or.
        const u32 at = (from ^ kk % 4 * 32) + kk / 4 * DS::kPanelBytes;
        u32 a[kTogether][4];
#pragma unroll
        for (int t = 0; t < kTogether; ++t) ptx::ldmatrix_x4(a[t], at + (i + t) * 16 * kPanelPitch);
#pragma unroll
        for (int t = 0; t < kTogether; ++t)
          Half::mma(x[t][0][0], x[t][0][1], x[t][1][0], x[t][1][1], a[t], Half::kOnes, Half::kOnes);
      }
      const int mine = ptx::thread_index() % 4;
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int eight = 2 * (i + t) + h;  // rows
          if (eight % 4 == 0 || mine == eight % 4) r[eight / 4] = x[t][h][0];
        }
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

// Sums of the rows of dS, for centred dQ (emulation/center.py), by one warp: a tile times a column
// of ones, from zero, added in fp32 where and when the tile's share of dQ is.
#pragma once

#include "sm90/gradient.cuh"

namespace cuflash::sm90 {

// Empty unless kOn. r[j] is of row 32 j + lane % 4 * 8 + lane / 4 of a block.
template <class S, bool kOn_>
struct RowSums {
  static constexpr bool kOn = kOn_;
  static constexpr int kCount = kOn ? S::kBlockM / 32 : 1;
  float r[kCount], before[kCount];

  // Of a tile in shared memory. All columns of the product are alike; of the four lanes that have a
  // row's, one keeps it.
  __device__ __forceinline__ void sum(u32 tile) {
    using DS = typename S::DS;
    using Half = typename S::Half;
    const int lane = threadIdx.x % 32;
    const u32 from = tile + DS::chunk(lane % 16, lane / 16 * 8);
#pragma unroll
    for (int i = 0; i < S::kBlockM / 16; ++i) {
      float x[2][2] = {};
#pragma unroll
      for (int kk = 0; kk < S::kBlockN / 16; ++kk) {
        u32 a[4];
        // The swizzle moves a step of 32 bytes within a row of 128 as an exclusive or.
        ptx::ldmatrix_x4(
            a, (from ^ kk % 4 * 32) + kk / 4 * DS::kPanelBytes + i * 16 * kPanelPitch);
        Half::mma(x[0][0], x[0][1], x[1][0], x[1][1], a, Half::kOnes, Half::kOnes);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int eight = 2 * i + h;  // rows
        if (eight % 4 == 0 || lane % 4 == eight % 4) r[eight / 4] = x[h][0];
      }
    }
  }

  __device__ __forceinline__ static int row(int j) {
    return 32 * j + threadIdx.x % 4 * 8 + threadIdx.x % 32 / 4;
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

// The two products of the Hopper forward, as chains of wgmma along k.
#pragma once

#include "ptx/wgmma.cuh"
#include "sm90/schedule.cuh"
#include "sm90/softmax.cuh"

namespace cuflash::sm90 {

// S = Q K^T of one warpgroup, issued.
template <class S>
__device__ __forceinline__ void issue_scores(Scores<S::kGroups>& s, u32 q, u32 k) {
  const u32 a = ptx::opaque(descriptor(q, 16)), b = descriptor(k, 16);
#pragma unroll
  for (int kk = 0; kk < S::kD / 16; ++kk) {
    const u32 a_step = (kk / 4 * S::Q::kPanelBytes + kk % 4 * 32) / 16,
              b_step = (kk / 4 * S::K::kPanelBytes + kk % 4 * 32) / 16;
    ptx::Wgmma<S::kBlockN>::template ss<S::kBf16, 0>(s, whole(a + a_step), whole(b + b_step),
                                                     kk > 0);
  }
}

// o += P V, issued; with it the sum of the rounded P in the group of columns after V's.
template <class S, Ones kOnes, int kColumns>
__device__ __forceinline__ void issue_output(Scores<kColumns>& o, const u32 (&p)[S::kGroups / 2][4],
                                             u32 v, u32 ones) {
  constexpr int kDv = S::kDv, kGroupsV = kDv / 8;
  const u32 b = descriptor(v, S::V::kPanelBytes);
#pragma unroll
  for (int kk = 0; kk < S::kBlockN / 16; ++kk) {
    const u32 step = kk * 16 * kPanelPitch / 16;
    if constexpr (kOnes == Ones::kJoined) {
      constexpr int kFirst = kDv - kPanelCols;  // columns of the product without the ones
      if constexpr (kFirst > 0)
        ptx::Wgmma<kFirst>::template rs<S::kBf16, 0>(o, p[kk], whole(b + step));
      const u32 last = v + S::V::kPanelBytes * (S::V::kCount - 1);
      const u32 joined = descriptor(last, ones - last) + step - (step << 16);
      ptx::Wgmma<kPanelCols + 8>::template rs<S::kBf16, kFirst / 8>(o, p[kk], whole(joined));
    } else {
      ptx::Wgmma<kDv>::template rs<S::kBf16, 0>(o, p[kk], whole(b + step));
      if constexpr (kOnes == Ones::kApart)
        ptx::Wgmma<8>::template rs<S::kBf16, kGroupsV>(o, p[kk], whole(descriptor(ones, 16)));
    }
  }
}

}  // namespace cuflash::sm90

// What sm90/backward_wide.cu works with: its shared memory and barriers.
#pragma once

#include "sm90/specials.cuh"

namespace cuflash::sm90 {

template <class Half_, int kD_, int kDv_>
struct WideShape {
  using Half = Half_;
  static constexpr int kD = kD_, kDv = kDv_, kBlockM = 64, kBlockN = 64;
  static constexpr int kColumns = kD > kDv ? kD : kDv;  // of an accumulator; the rest is not used
  // Registers of a thread that loads or waits, and of a consumer's: what the launch gave, shared
  // anew. Where dQ is centred, the first kind also sums rows of dS.
  static constexpr int kLoaderRegs = 24, kConsumerRegs = 240, kSumRegs = 8;
  static constexpr bool kTogether = false, kBf16 = Half::kOnes == 0x3f803f80u;
  using K = Panels<kBlockN, kD>;
  using V = Panels<kBlockN, kDv>;
  using Q = Panels<kBlockM, kD>;
  using DO = Panels<kBlockM, kDv>;
  using DS = Panels<kBlockM, kBlockN>;                          // and P: rows are queries
  static constexpr int kParts = K::kCount < 2 ? 2 : K::kCount;  // of the sums of a block
  static constexpr int kPartM = K::kCount == 1 ? kBlockM / 2 : kBlockM;
  static constexpr int kTake = K::kCount == 1 ? 1 : (K::kCount + 1) / 2;  // parts of a warpgroup
  // Shared memory, in bytes from its start.
  static constexpr u32 kK = 0, kV = kK + K::kBytes, kQ = kV + V::kBytes, kDO = kQ + 2 * Q::kBytes,
                       kP = kDO + 2 * DO::kBytes, kDS = kP + DS::kBytes,
                       kLse = kDS + 2 * DS::kBytes, kDelta = kLse + 8 * kBlockM,
                       kBarriers = kDelta + 8 * kBlockM;
  // Barriers; then words, of a stage each: the count of a block's additions that was found, the
  // last step with a small share, whether rows hold NaN or Inf, the block among those of all heads,
  // of a warpgroup each: whether K does (of a CTA that converts: its tickets), of a stage: twice
  // the block of rows, and 1 if it is cut; then the tiles of two rounds.
  static constexpr u32 kKeysFull = kBarriers, kKeysEmpty = kKeysFull + 8,
                       kNextFull = kKeysEmpty + 8, kNextEmpty = kNextFull + 8,
                       kQFull = kNextEmpty + 8, kQEmpty = kQFull + 16, kDOFull = kQEmpty + 16,
                       kDOEmpty = kDOFull + 16, kDSFull = kDOEmpty + 16, kDSEmpty = kDSFull + 16,
                       kTurnCome = kDSEmpty + 16, kAdded = kTurnCome + 16, kTold = kAdded + 16,
                       kFoundAt = kTold + 16, kSmallAt = kFoundAt + 8, kSpecialAt = kSmallAt + 8,
                       kBlockAt = kSpecialAt + 8, kInKeysAt = kBlockAt + 8, kMarkAt = kInKeysAt + 8,
                       kTile = kMarkAt + 8, kBytes = kTile + 2 * Piece<kBlockM, kBlockN>::kBytes;
};

template <class S, bool kCenter>
__device__ __forceinline__ void init_wide_barriers(u32 base) {
  constexpr u32 kWarps = kConsumers / 32, kLanes = kCenter ? 32 : 0;
  ptx::mbarrier_init(base + S::kKeysFull, 1);
  ptx::mbarrier_init(base + S::kKeysEmpty, kWarps);
  ptx::mbarrier_init(base + S::kNextFull, 1);
  ptx::mbarrier_init(base + S::kNextEmpty, kWarps + (kCenter ? 3 : 2));
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(base + S::kQFull + 8 * i, 1);
    ptx::mbarrier_init(base + S::kQEmpty + 8 * i, kWarps);
    ptx::mbarrier_init(base + S::kDOFull + 8 * i, 1);
    ptx::mbarrier_init(base + S::kDOEmpty + 8 * i, kWarps);
    ptx::mbarrier_init(base + S::kDSFull + 8 * i, kWarps / 2);
    ptx::mbarrier_init(base + S::kDSEmpty + 8 * i, kWarps + kLanes);
    ptx::mbarrier_init(base + S::kTurnCome + 8 * i, 1);
    ptx::mbarrier_init(base + S::kAdded + 8 * i, kWarps + (kCenter ? 1 : 0));
    ptx::mbarrier_init(base + S::kTold + 8 * i, 1);
    ptx::st_shared(base + S::kSmallAt + 4 * i, -1);
  }
  ptx::fence_mbarrier_init();
}

}  // namespace cuflash::sm90

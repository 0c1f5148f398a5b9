// What sm90/backward.cu works with: tiles, its shared memory, and what is told about a step.
#pragma once

#include "sm90/specials.cuh"
#include "sm90/sums.cuh"

namespace cuflash::sm90 {

// kBlockM: queries of a step, which changes no bit.
template <class Half_, int kD_, int kDv_, int kBlockM_>
struct BackwardShape {
  using Half = Half_;
  static constexpr int kD = kD_, kDv = kDv_, kBlockM = kBlockM_, kBlockN = 128;
  // Registers of a thread that loads or adds, and of a consumer's: what the launch gave, shared
  // anew.
  static constexpr int kLoaderRegs = 24, kConsumerRegs = 240;
  static constexpr bool kTogether = true, kBf16 = Half::kOnes == 0x3f803f80u;
  // Whether a step makes S of the next one, which has registers left for 64 queries.
  static constexpr bool kAhead = kBlockM <= 64;
  using K = Panels<kBlockN, kD>;
  using V = Panels<kBlockN, kDv>;
  using Q = Panels<kBlockM, kD>;
  using DO = Panels<kBlockM, kDv>;
  using DS = Panels<kBlockM, kBlockN>;  // rows are queries
  // A warpgroup's part of dQ: one panel of columns, or half of the queries.
  static constexpr int kParts = 2;
  static constexpr int kPartM = K::kCount == 2 ? kBlockM : kBlockM / 2;
  static constexpr int kShareBytes = 2 * Part<kPartM>::kBytes;
  // From one warpgroup's part to the other's: in K, and in dS.
  static constexpr u32 kColumnsBytes = K::kCount == 2 ? K::kPanelBytes : 0,
                       kQueriesBytes = K::kCount == 2 ? 0 : kPartM * kPanelPitch;
  // Steps whose marks are kept: when that of step n + 8 is written, consumers have let go of dO of
  // step n + 4. So they have handed out step n + 2, in the place of n, which had been read.
  static constexpr int kMarks = 8;
  // Shared memory, in bytes from its start.
  static constexpr u32 kK = 0, kV = kK + K::kBytes, kQ = kV + V::kBytes, kDO = kQ + 2 * Q::kBytes,
                       kDS = kDO + 2 * DO::kBytes, kShare = kDS + 2 * DS::kBytes,
                       kLse = kShare + 2 * kShareBytes, kDelta = kLse + 8 * kBlockM,
                       kRows = kDelta + 8 * kBlockM, kOnes = kRows + 4 * kBlockM,
                       kBarriers = kOnes + kOnesBytes;
  static constexpr u32 kKeysFull = kBarriers, kKeysEmpty = kKeysFull + 8,
                       kLookedAt = kKeysEmpty + 8, kNextFull = kLookedAt + 8,
                       kNextEmpty = kNextFull + 8, kQFull = kNextEmpty + 8, kQEmpty = kQFull + 16,
                       kDOFull = kQEmpty + 16, kDOEmpty = kDOFull + 16, kDSFull = kDOEmpty + 16,
                       kDSEmpty = kDSFull + 16, kShareFull = kDSEmpty + 16,
                       kShareEmpty = kShareFull + 16, kRowsFull = kShareEmpty + 16,
                       kRowsEmpty = kRowsFull + 8, kTile = kRowsEmpty + 8,
                       kInK = kTile + 2 * Piece<kBlockM, kBlockN>::kBytes, kMark = kInK + 8,
                       kBytes = kMark + 12 * kMarks;
  // dK leaves through dS, each warpgroup's through the columns that it writes, so that the next K
  // may come; where a block has but 32 rows, through K.
  static constexpr bool kDkInDs = kBlockM >= 64;
  static_assert(!kDkInDs || K::kCount == 1 || K::kPanelBytes == DS::kBytes, "panels of dK fit");
};

// What is told about a step with its dO, in three words. Its mark: whether its rows are cut (some
// are absent, or see the tile in part), then perhaps with NaN or Inf in them, whether one is
// centred, with a bit in turn; above these bits, the block of rows. The block among those of all
// heads; the tile's turn there.
constexpr i32 kBlockBits = 4;
constexpr u32 kCut = 8, kInRows = 4, kCentered = 2;
// What a consumer remembers, in one register: of the step before kCentered and its bit; NaN or Inf
// in K, a step of this tile is done, K was looked at; the parity of tiles; the marks of this step
// and of the next one.
constexpr u32 kInKeys = 16, kBegun = 32, kLooked = 64, kRound = 128;
constexpr u32 kOfTile = kInKeys | kBegun | kLooked | kRound;  // what lasts from step to step
constexpr int kHere = 8, kNext = 12;

// A step of a consumer: without a mask, under a mask, with all that may be.
enum class Step { kUsual, kMasked, kAny };

template <class S, bool kCenter>
__device__ __forceinline__ void init_barriers(u32 base) {
  constexpr u32 kWarps = kConsumers / 32;
  ptx::mbarrier_init(base + S::kKeysFull, 1);
  ptx::mbarrier_init(base + S::kKeysEmpty, kWarps);
  ptx::mbarrier_init(base + S::kLookedAt, 32);
  ptx::mbarrier_init(base + S::kNextFull, 1);
  ptx::mbarrier_init(base + S::kNextEmpty, kWarps + 3);
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(base + S::kQFull + 8 * i, 1);
    ptx::mbarrier_init(base + S::kQEmpty + 8 * i, kWarps);
    ptx::mbarrier_init(base + S::kDOFull + 8 * i, 1 + 32);
    ptx::mbarrier_init(base + S::kDOEmpty + 8 * i, kWarps);
    ptx::mbarrier_init(base + S::kDSFull + 8 * i, kWarps);
    ptx::mbarrier_init(base + S::kDSEmpty + 8 * i, kWarps);
    ptx::mbarrier_init(base + S::kShareFull + 8 * i, kWarps);
    ptx::mbarrier_init(base + S::kShareEmpty + 8 * i, 1);
  }
  if constexpr (kCenter) {
    ptx::mbarrier_init(base + S::kRowsFull, S::kBlockM == 128 ? kConsumers : kConsumers / 2);
    ptx::mbarrier_init(base + S::kRowsEmpty, 32);
  }
  ptx::fence_mbarrier_init();
}

// The mark of a step but for what is centred. By a whole warp.
template <bool kSoftcap, int kBlockM, int kBlockN>
__device__ __forceinline__ u32 mark_rows(const BackwardParams& params,
                                         const Piece<kBlockM, kBlockN>& piece, const Walk& walk) {
  const u32 block = walk.block << kBlockBits;
  if (piece.plain(walk.block)) return block;
  const i64 row = static_cast<i64>(piece.batch * params.heads + walk.head) * params.pitch +
                  walk.block * kBlockM;
  const bool some =
      params.masked && (kSoftcap || may_be_in_rows<kBlockM>(params.lse2 + row, params.delta + row));
  return block | kCut | (some ? kInRows : 0);
}

}  // namespace cuflash::sm90

// Who does what in the Hopper forward: shapes of tiles, the schedule (which changes no bit), the
// layout of shared memory, and the blocks of rows in the order in which clusters take them.
#pragma once

#include "tile/band.cuh"
#include "tile/panel.cuh"

namespace cuflash::sm90 {

// How the rounded P is summed: not at all, by products with eight columns of ones, or by the
// product of V's last panel with those columns beside it.
enum class Ones { kNone, kApart, kJoined };

template <class Half_, int kD_, int kDv_, int kBlockN_>
struct Shape {
  using Half = Half_;
  static constexpr int kD = kD_, kDv = kDv_, kBlockN = kBlockN_;
  static constexpr int kGroups = kBlockN / 8;  // n8 blocks of a tile of scores
  static constexpr bool kBf16 = Half::kOnes == 0x3f803f80u;
  static constexpr bool kStaged = kDv <= 128;  // O in halves leaves through shared memory
  using Q = Panels<64, kD>;                    // of one warpgroup
  using K = Panels<kBlockN, kD>;
  using V = Panels<kBlockN, kDv>;
  using O = Panels<16, kDv>;  // of one warp
};

// What changes no bit. kWarpgroups: consumers. kStages: of K and of V. kQStages: of Q. kPingPong:
// warpgroups take turns at the tensor cores. kEarly: a step asks for the next one's tiles. kJoined:
// a block's last product runs beside the first scores of the next block.
template <int kWarpgroups_, int kCluster_, int kStages_, int kQStages_, bool kPingPong_,
          bool kEarly_, bool kJoined_, Ones kOnes_>
struct Schedule {
  static constexpr int kWarpgroups = kWarpgroups_, kCluster = kCluster_, kStages = kStages_,
                       kQStages = kQStages_;
  static constexpr bool kPingPong = kPingPong_, kEarly = kEarly_, kJoined = kJoined_;
  static constexpr Ones kOnes = kOnes_;
  static constexpr int kBlockM = 64 * kWarpgroups, kThreads = 128 * (kWarpgroups + 1);
  // Registers of a producer's and of a consumer's thread: what the launch gave, shared anew.
  static constexpr int kProducerRegs = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegs = kWarpgroups == 2 ? 232 : (kWarpgroups == 3 ? 160 : 112);
  static constexpr int kScanWarps = 3;
};

// Shared memory, in bytes from its start, and the barriers that hand it on.
//
// Why every wait ends. The i-th tile of K (of V) since the launch lies in stage i % kStages; its
// "full" is phase i / kStages of that stage, and so is its "empty". A full phase completes when
// both CTAs have loaded; an empty phase when every consumer warp of the cluster has released the
// tile, and for V every scanning warp. All of them wait for and release every tile, also those that
// they do not use. So no barrier is ever two phases ahead of somebody who waits for it, and a
// parity means one phase. What waits, for what:
// - The producer, for tile i - kStages to be released. Loads are issued in the order K of the next
//   tile, V of this one, so that K of tile j + n, n >= 2, comes after V of tile j + n - 2.
//   Consumers hold nothing older than V of tile j when they wait for K of j + 1 or V of j; where
//   the product with V of j is joined to the next block's first scores, for K of at most j +
//   kStages, behind tiles of which they skip K: that comes after V of j + kStages - 2, whose place
//   is free.
// - Scanning warps, for V to be full. They clear what they have to clear, and say "clean", before
//   they release; a tile that one CTA scans is waited for by those of its consumers that use it.
//   Before they mark a tile that held some they wait for its place to have been released, which it
//   was before the tile was loaded.
// - Consumers, for their turn at the tensor cores. They wait for data before their turn and for
//   nothing between taking and passing it. All warpgroups of a CTA take as many turns for a block
//   of rows, the n-th one at the same tile: one warpgroup's turn asks for nothing that another
//   would release only after a later turn. (V of tile j is held for at most kStages turns; the last
//   of them asks for V of at most j + kStages - 1.)
// - The producer, for a place of Q. It is given back with the scores of the last tile that its
//   warpgroup sees, before anything of the next block is asked for.
// - A warp's first lane, for its stores of O to have read their places: TMA waits for nobody.
// - The mailbox of work has two places; a place is filled again when all have read it, and all read
//   a block's number before they start on it.
// A CTA of a cluster ends with its peer, whose arrivals and loads reach its shared memory.
template <class S, class P>
struct Layout {
  static constexpr u32 kQSlot = S::Q::kBytes;
  static constexpr u32 kOSlot = S::kStaged ? 2 * S::O::kPanelBytes : 0;  // of a warp: two panels
  static constexpr u32 kQ = 0, kK = kQ + P::kQStages * P::kWarpgroups * kQSlot,
                       kV = kK + P::kStages * S::K::kBytes, kO = kV + P::kStages * S::V::kBytes,
                       kOnes = kO + 4 * P::kWarpgroups * kOSlot,
                       kBarriers = kOnes + (P::kOnes == Ones::kNone ? 0 : 16 * kPanelPitch);
  // Barriers of 8 bytes.
  static constexpr u32 kKFull = kBarriers, kVFull = kKFull + 8 * P::kStages,
                       kKEmpty = kVFull + 8 * P::kStages, kVEmpty = kKEmpty + 8 * P::kStages,
                       kVClean = kVEmpty + 8 * P::kStages, kQFull = kVClean + 8 * P::kStages,
                       kQEmpty = kQFull + 8 * P::kQStages * P::kWarpgroups,
                       kWorkFull = kQEmpty + 8 * P::kQStages * P::kWarpgroups,
                       kWorkEmpty = kWorkFull + 16, kWork = kWorkEmpty + 16, kFound = kWork + 8,
                       kBytes = kFound + 4 * P::kStages;
};

// n / d for 0 <= n < 2^31: with 2^s the first power of two that is not below d and
// multiplier = ceil(2^(31 + s) / d), the quotient is n multiplier / 2^(31 + s), rounded down.
struct Divisor {
  u32 multiplier, shift;  // shift = 31 + s

  __device__ __forceinline__ i32 of(i32 n) const {
    return static_cast<i32>(static_cast<u64>(static_cast<u32>(n)) * multiplier >> shift);
  }
};

// Blocks of rows of all heads, in sets of heads whose K and V stay in the L2 cache together. The
// last set has what is left.
struct Order {
  i32 works;                    // blocks of all heads
  i32 blocks;                   // of one head
  i32 first_block, next_block;  // the block taken first, the step to the one taken after it
  i32 whole_sets;               // before the last one
  i32 set, last;                // heads of a set, of the last one
  i32 in_batch;                 // query heads of a batch entry
  i32 shift;                    // rows that block 0 lacks, a multiple of 64
  Divisor by_set;               // blocks of a set
  Divisor by_head;              // heads of a set
  Divisor by_last;              // heads of the last one
  Divisor by_batch, by_group;   // query heads of a batch entry, of a key head
};

// The block of rows that a CTA takes, and the tiles of keys that it and its cluster walk.
template <class S, class P>
struct Work {
  i32 flat_head;
  i32 first_row, first, last_row;  // first: not before row 0; last_row < first: nothing
  i32 begin, end;                  // of the cluster: loaded by both CTAs
  i32 full_begin, full_end;        // tiles that every row of the CTA sees whole
  i32 clean_begin, clean_end;      // tiles of which every row sees all keys that exist

  __device__ __forceinline__ static void tiles(const Band& band, i32 first, i32 last, i32& begin,
                                               i32& end) {
    const i32 low = band.low(first), high = last < first ? 0 : band.high(last);
    begin = low / S::kBlockN;
    end = high > low ? (high + S::kBlockN - 1) / S::kBlockN : begin;
  }

  // The heads of a set side by side; their heavy blocks first.
  __device__ __forceinline__ Work(const Order& order, const Band& band, i32 work, i32 rank) {
    constexpr i32 kRows = P::kBlockM * P::kCluster;
    const i32 set = order.by_set.of(work), first_head = set * order.set;
    const i32 rest = work - first_head * order.blocks;
    const bool last = set == order.whole_sets;
    const i32 above = (last ? order.by_last : order.by_head).of(rest);
    const i32 block = order.first_block + above * order.next_block;
    flat_head = first_head + rest - above * (last ? order.last : order.set);
    const i32 start = block * kRows - order.shift;
    tiles(band, max(start, 0), min(start + kRows, band.n_q) - 1, begin, end);
    first_row = start + rank * P::kBlockM;
    first = max(first_row, 0);
    last_row = min(first_row + P::kBlockM, band.n_q) - 1;
    const i32 high = band.high(first);
    full_begin = clean_begin = (band.low(last_row) + S::kBlockN - 1) / S::kBlockN;
    full_end = high / S::kBlockN;
    clean_end = high < band.n_k ? full_end : (high + S::kBlockN - 1) / S::kBlockN;
  }

  __device__ __forceinline__ bool scanned(i32 tile) const {
    return tile < clean_begin || tile >= clean_end;
  }
};

}  // namespace cuflash::sm90

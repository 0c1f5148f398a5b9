// dQ, dK and dV on Hopper in one pass, head dimensions above 128. A CTA takes 64 keys of one key
// head and walks all rows that see them, of all query heads of the group, in ascending order, 64 a
// step. Of two consumer warpgroups the first accumulates dV and the second dK. They take turns in
// making P and dS of a step: one computes while products of the other's step run. What the maker
// has in registers it multiplies from there, the other from shared memory. Each adds its columns of
// dQ from registers; where it is centred, one more warp adds sums of the rows of dS. See
// sm90/sums.cuh for the order of dQ and why every wait for other CTAs ends.
#include "sm90/convert.cuh"
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
  static constexpr u32 kKeysFull = kBarriers, kQFull = kKeysFull + 8, kQEmpty = kQFull + 16,
                       kDOFull = kQEmpty + 16, kDOEmpty = kDOFull + 16, kDSFull = kDOEmpty + 16,
                       kDSEmpty = kDSFull + 16, kTurnCome = kDSEmpty + 16, kAdded = kTurnCome + 16,
                       kTold = kAdded + 16, kFoundAt = kTold + 16, kSmallAt = kFoundAt + 8,
                       kSpecialAt = kSmallAt + 8, kTicket = kSpecialAt + 8, kBlockAt = kTicket + 8,
                       kInKeysAt = kBlockAt + 8, kBytes = kInKeysAt + 8;
};

// kCenter: dQ is centred; not under a softcap.
template <class S, bool kSoftcap, bool kFloatOut, bool kCenter>
__global__ void __launch_bounds__(kThreads, 1)
    backward_wide(const __grid_constant__ BackwardParams params) {
  using Half = typename S::Half;
  using Q = typename S::Q;
  using DO = typename S::DO;
  using K = typename S::K;
  using V = typename S::V;
  using DS = typename S::DS;
  constexpr int kBlockM = S::kBlockM, kBlockN = S::kBlockN;
  constexpr int kGroups = kBlockM / 8;
  constexpr bool kBf16 = S::kBf16;
  extern __shared__ __align__(1024) char shared[];
  const u32 base = ptx::shared_address(shared);
  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const Band& band = params.band;

  if (threadIdx.x == 0) {
    constexpr u32 kWarps = kConsumers / 32, kLanes = kCenter ? 32 : 0;
    const i32 ticket = atomicAdd(params.tickets, 1);
    ptx::mbarrier_init(base + S::kKeysFull, 1);
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
    ptx::st_shared(base + S::kTicket, ticket);
  }
  __syncthreads();
  const i32 ticket = ptx::ld_shared(base + S::kTicket);
  if (ticket >= params.pieces) {
    Conversion<S, kFloatOut, kCenter>(params, ticket - params.pieces)
        .run(reinterpret_cast<float*>(shared));
    return;
  }
  const Piece<kBlockM, kBlockN> piece(params, ticket);
  auto block_at = [&](const Walk& walk) {
    const i32 blocks = (band.n_q + kBlockM - 1) / kBlockM;
    return (piece.batch * params.heads + walk.head) * blocks + walk.block;
  };

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<S::kLoaderRegs + (kCenter ? S::kSumRegs : 0)>();
    const int warp = threadIdx.x / 32;
    if constexpr (kCenter) {
      // -- A whole warp that adds the sums of rows of dS -----------------------------------------
      for (i32 step = 0; warp == 3 && step < piece.steps; ++step) {
        const u32 stage = step % 2, parity = step / 2 % 2;
        WarpRowSums<S> rows;
        const bool any = Centered::of(params, piece.batch, piece.kv_head)
                             .any<kBlockM>(Walk::at(piece, params.group, step).block * kBlockM);
        ptx::mbarrier_wait(base + S::kDSFull + 8 * stage, parity);
        if (any) rows.sum(base + S::kDS + stage * DS::kBytes);
        ptx::mbarrier_arrive(base + S::kDSEmpty + 8 * stage);
        ptx::mbarrier_wait(base + S::kTurnCome + 8 * stage, parity);
        const bool first = ptx::ld_shared(base + S::kFoundAt + 4 * stage) == 0;
        float* const sums =
            params.row_sums +
            static_cast<i64>(ptx::ld_shared(base + S::kBlockAt + 4 * stage)) * kBlockM;
        if (any && !first) rows.fetch(sums);
        if (any) rows.store(sums, first);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(base + S::kAdded + 8 * stage);
      }
    }
    if (lane != 0 || piece.steps == 0) return;
    if (warp == 0) {
      // -- The loader: K and V once, then Q and dO of every step with LSE and delta --------------
      auto load = [&](const ptx::TensorMap& map, u32 to, u32 full, int panels, int panel_bytes,
                      i32 row, i32 head) {
        for (int i = 0; i < panels; ++i)
          ptx::tma_load_4d(to + i * panel_bytes, map, full, i * kPanelCols, row, head, piece.batch);
      };
      ptx::mbarrier_arrive_expect_tx(base + S::kKeysFull, K::kBytes + V::kBytes);
      load(params.k_map, base + S::kK, base + S::kKeysFull, K::kCount, K::kPanelBytes,
           piece.first_key, piece.kv_head);
      load(params.v_map, base + S::kV, base + S::kKeysFull, V::kCount, V::kPanelBytes,
           piece.first_key, piece.kv_head);
      Walk walk = Walk::at(piece, params.group, 0);
      for (i32 step = 0; step < piece.steps; ++step, walk.next(piece)) {
        const u32 stage = step % 2, parity = step / 2 % 2 ^ 1;
        const i32 row = walk.block * kBlockM;
        const i64 at =
            static_cast<i64>(piece.batch * params.heads + walk.head) * params.pitch + row;
        const u32 q_full = base + S::kQFull + 8 * stage, do_full = base + S::kDOFull + 8 * stage;
        ptx::mbarrier_wait(base + S::kQEmpty + 8 * stage, parity);
        ptx::mbarrier_arrive_expect_tx(q_full, Q::kBytes + kBlockM * 4);
        load(params.q_map, base + S::kQ + stage * Q::kBytes, q_full, Q::kCount, Q::kPanelBytes, row,
             walk.head);
        ptx::bulk_load(base + S::kLse + stage * kBlockM * 4, params.lse2 + at, kBlockM * 4, q_full);
        ptx::mbarrier_wait(base + S::kDOEmpty + 8 * stage, parity);
        ptx::mbarrier_arrive_expect_tx(do_full, DO::kBytes + kBlockM * 4);
        load(params.dout_map, base + S::kDO + stage * DO::kBytes, do_full, DO::kCount,
             DO::kPanelBytes, row, walk.head);
        ptx::bulk_load(base + S::kDelta + stage * kBlockM * 4, params.delta + at, kBlockM * 4,
                       do_full);
      }
    } else if (warp == 1) {
      // -- Waits for this tile's turns, a step or two ahead --------------------------------------
      for (i32 step = 0; step < piece.steps; ++step) {
        const Walk walk = Walk::at(piece, params.group, step);
        const i32 turn = turn_of<kBlockM, kBlockN>(params, piece.tile, walk.block);
        i32 found = 0;
        if (turn > 0) {
          do {
            found = ptx::ld_relaxed_gpu(params.turns + block_at(walk));
          } while ((found & ~kSmall) != turn);
          ptx::fence_acquire_gpu();
        }
        ptx::mbarrier_wait(base + S::kTold + 8 * (step % 2), step / 2 % 2 ^ 1);
        ptx::st_shared(base + S::kFoundAt + 4 * (step % 2), found);
        if constexpr (kCenter) ptx::st_shared(base + S::kBlockAt + 4 * (step % 2), block_at(walk));
        ptx::mbarrier_arrive(base + S::kTurnCome + 8 * (step % 2));
      }
    } else if (warp == 2) {
      // -- Says what has been added --------------------------------------------------------------
      for (i32 step = 0; step < piece.steps; ++step) {
        ptx::mbarrier_wait(base + S::kAdded + 8 * (step % 2), step / 2 % 2);
        const i32 found = ptx::ld_shared(base + S::kFoundAt + 4 * (step % 2));
        const i32 mark = ptx::ld_shared(base + S::kSmallAt + 4 * (step % 2)) == step ? kSmall : 0;
        const i32 at = kCenter ? ptx::ld_shared(base + S::kBlockAt + 4 * (step % 2))
                               : block_at(Walk::at(piece, params.group, step));
        ptx::st_release_gpu(params.turns + at, found + 1 | mark);
        ptx::mbarrier_arrive(base + S::kTold + 8 * (step % 2));
      }
    }
    return;
  }

  // -- Consumers -----------------------------------------------------------------------------
  ptx::setmaxnreg_inc<S::kConsumerRegs - (kCenter ? S::kSumRegs : 0)>();
  const int mine = warpgroup - 1, thread = threadIdx.x % 128;
  const Place place = Place::of(thread);
  float acc[2][S::kColumns / 8][2];  // dV or dK
  clear(acc);
  Specials<S> specials(params, shared, mine);
  // Whether K has NaN or Inf. Where dQ is centred, there is no register left for it: a warpgroup
  // has a word.
  const u32 in_keys_at = base + S::kInKeysAt + 4 * mine;
  auto in_keys = [&] { return kCenter ? ptx::ld_shared(in_keys_at) != 0 : specials.in_keys; };
  auto arrive = [&](u32 barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };

  auto issue_scores = [&](Accumulator<kGroups>& s, u32 stage) {
    ptx::fence_operands(s);
    ptx::wgmma_fence();
    issue_columns<kBf16, K, Q, S::kD>(s, descriptor(base + S::kK, 16),
                                      descriptor(base + S::kQ + stage * Q::kBytes, 16));
    ptx::wgmma_commit_group();
  };
  auto issue_dp = [&](Accumulator<kGroups>& dp, u32 stage) {
    ptx::fence_operands(dp);
    ptx::wgmma_fence();
    issue_columns<kBf16, V, DO, S::kDv>(dp, descriptor(base + S::kV, 16),
                                        descriptor(base + S::kDO + stage * DO::kBytes, 16));
    ptx::wgmma_commit_group();
  };
  auto wait_q = [&](i32 step) {
    ptx::mbarrier_wait(base + S::kQFull + 8 * (step % 2), step / 2 % 2);
  };
  auto wait_do = [&](i32 step) {
    ptx::mbarrier_wait(base + S::kDOFull + 8 * (step % 2), step / 2 % 2);
  };
  auto wait_ds = [&](i32 step) {
    ptx::mbarrier_wait(base + S::kDSFull + 8 * (step % 2), step / 2 % 2);
  };
  // dV += P^T dO or dK += dS^T Q: of the other's step, and of one's own.
  auto rows_of = [&](u32 stage) {
    return mine == 0 ? descriptor(base + S::kDO + stage * DO::kBytes, DO::kPanelBytes)
                     : descriptor(base + S::kQ + stage * Q::kBytes, Q::kPanelBytes);
  };
  auto issue_others = [&](u32 stage) {
    ptx::fence_operands(acc);
    ptx::wgmma_fence();
    const u32 weights = base + (mine == 0 ? S::kP : S::kDS + stage * DS::kBytes);
    issue_both_rows<kBf16>(acc, descriptor(weights, 16), rows_of(stage));
    ptx::wgmma_commit_group();
  };
  auto issue_own = [&](u32(&weights)[kGroups / 2][4], u32 stage) {
    ptx::fence_operands(acc);
    ptx::fence_operands(weights);
    ptx::wgmma_fence();
    issue_rows<kBf16>(acc, weights, rows_of(stage));
    ptx::wgmma_commit_group();
  };
  // What the specials of the other's step do to dV or dK, if it has some. They have been taken out
  // of Q and dO.
  auto add_others = [&](i32 step) {
    const u32 stage = step % 2;
    const Walk walk = Walk::at(piece, params.group, step);
    if (piece.plain(walk.block) || !params.masked) return;
    const bool some = lane == 0 && ptx::ld_shared(base + S::kSpecialAt + 4 * stage) != 0;
    if (!__any_sync(kWholeWarp, some)) return;
    specials.add_rows_of(acc, piece, shared + (mine == 0 ? S::kP : S::kDS + stage * DS::kBytes),
                         walk, 0, mine == 0);
  };
  // dQ: 64 columns of the head by all queries, or half of them if there are no more columns.
  auto issue_share = [&](Accumulator<S::kPartM / 8>& share, int i, u32 stage) {
    const int part = mine * S::kTake + i;
    const u32 k = base + S::kK + (K::kCount == 1 ? 0 : part * K::kPanelBytes),
              ds = base + S::kDS + stage * DS::kBytes +
                   (K::kCount == 1 ? part * S::kPartM * kPanelPitch : 0);
    ptx::fence_operands(share);
    ptx::wgmma_fence();
    issue_transposed<kBf16, DS, kBlockN>(share, descriptor(k, 16), descriptor(ds, 16));
    ptx::wgmma_commit_group();
  };
  // at: the block's place among all.
  auto add = [&](Accumulator<S::kPartM / 8>& share, int i, i32 step, i32 at, bool in_keys) {
    const int part = mine * S::kTake + i;
    const u32 stage = step % 2;
    if (part < S::kParts) {
      if (in_keys)
        specials.add_keys(share, piece, shared + S::kDS + stage * DS::kBytes,
                          Walk::at(piece, params.group, step).block,
                          K::kCount == 1 ? 0 : part * kPanelCols,
                          K::kCount == 1 ? part * S::kPartM : 0);
      const bool small = holds_small(share);
      // Behind this wait, the mark that this place held two steps ago has been read.
      if (i == 0) ptx::mbarrier_wait(base + S::kTurnCome + 8 * stage, step / 2 % 2);
      if (small && lane == 0) ptx::st_shared(base + S::kSmallAt + 4 * stage, step);
      const i32 found = ptx::ld_shared(base + S::kFoundAt + 4 * stage);
      if constexpr (kCenter) at = ptx::ld_shared(base + S::kBlockAt + 4 * stage);
      float* const sums =
          params.sums + (static_cast<i64>(at) * S::kParts + part) * (S::kPartM * 64) + thread * 4;
      add_registers(sums, share, found == 0, (found & kSmall) != 0 || small);
    }
    if (i < S::kTake - 1) return;
    __syncwarp();
    arrive(base + S::kAdded + 8 * stage);
  };

  const u32 own_ds = base + S::kDS + mine * DS::kBytes;
  float s[2][kGroups][2], dp[2][kGroups][2];
  // Steps of one's own have the stage `mine`.
  i32 step = mine;
  Walk walk = Walk::at(piece, params.group, 0);
  bool plain_before = true;
  i32 before = 0;  // block of the step before
  auto next = [&] {
    plain_before = piece.plain(walk.block);
    before = block_at(walk);
    walk.next(piece);
  };
  if (piece.steps > 0) {
    if (mine == 1) next();
    ptx::mbarrier_wait(base + S::kKeysFull, 0);
    if (params.masked) specials.look_at_keys();
    if (specials.in_keys) specials.clear_keys();
    if constexpr (kCenter) {
      if (thread == 0) ptx::st_shared(in_keys_at, specials.in_keys);
      ptx::bar_sync(kWarpgroup + mine, 128);
    }
    if (step < piece.steps) {
      wait_q(step);
      wait_do(step);
    }
    issue_scores(s, mine);
    issue_dp(dp, mine);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(s);
    ptx::fence_operands(dp);
  }

  // A step of one's own, and what is left of the one before, the other's.
  auto advance = [&](bool any) __attribute__((always_inline)) {
    const bool plain = !any || piece.plain(walk.block);
    const i32 here = block_at(walk);
    if (step > 0) {
      wait_ds(step - 1);
      if (any) add_others(step - 1);
      issue_others(mine ^ 1);
    }
    bool special = false;
    if (!plain && params.masked) {
      special = specials.template in_rows<kSoftcap>(mine);
      if (special) specials.clear_rows(mine);
      if (thread == 0) ptx::st_shared(base + S::kSpecialAt + 4 * mine, special);
    }
    if (any && in_keys()) specials.add_to_scores(s, piece, walk, 0, 0);
    u32 p_half[kGroups / 2][4], ds_half[kGroups / 2][4];
    Seen<kGroups> seen;
    if (!plain) look<kGroups>(seen, place, RowsOfKey{band, walk.block * kBlockM, piece.first_key});
#pragma unroll
    for (int kk = 0; kk < kGroups / 2; ++kk) {
      const u32 rows = (mine * kBlockM + 16 * kk + place.column) * 4;
      float p[2][2][2], ds[2][2][2], slope[2][kSoftcap ? 2 : 1][2];
      u32 half[1][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        p[i / 4][i / 2 % 2][i % 2] = s[i / 4][2 * kk + i / 2 % 2][i % 2];
        ds[i / 4][i / 2 % 2][i % 2] = dp[i / 4][2 * kk + i / 2 % 2][i % 2];
      }
      probabilities<kSoftcap>(p, slope, base + S::kLse + rows, params);
      if (!plain) clear_unseen(p, seen, 2 * kk);
      pack<Half>(half, p);
#pragma unroll
      for (int i = 0; i < 4; ++i) p_half[kk][i] = half[0][i];
      score_gradients<kSoftcap>(ds, p, slope, base + S::kDelta + rows);
      if (!plain) clear_unseen(ds, seen, 2 * kk);
      pack<Half>(half, ds);
#pragma unroll
      for (int i = 0; i < 4; ++i) ds_half[kk][i] = half[0][i];
    }
    ptx::mbarrier_wait(base + S::kDSEmpty + 8 * mine, step / 2 % 2 ^ 1);
    if (special && mine == 0) {  // P takes the place of dS for a while
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(acc);
      store_transposed<DS>(own_ds, p_half, 0, thread);
      ptx::bar_sync(kWarpgroup + mine, 128);
      specials.add_rows_of(acc, piece, shared + (own_ds - base), walk, 0, true);
      ptx::bar_sync(kWarpgroup + mine, 128);
    }
    store_transposed<DS>(own_ds, ds_half, 0, thread);
    if (mine == 1) store_transposed<DS>(base + S::kP, p_half, 0, thread);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(base + S::kDSFull + 8 * mine);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(acc);
    if (step > 0) {
      arrive(base + S::kQEmpty + 8 * (mine ^ 1));
      arrive(base + S::kDOEmpty + 8 * (mine ^ 1));
    }
    wait_ds(step);
    if (special && mine == 1)
      specials.add_rows_of(acc, piece, shared + (own_ds - base), walk, 0, false);
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i)
      p_half[i / 4][i % 4] = mine == 0 ? p_half[i / 4][i % 4] : ds_half[i / 4][i % 4];
    issue_own(p_half, mine);
    const bool keys_too = any && in_keys();
    float one[2][S::kPartM / 8][2], two[2][S::kPartM / 8][2];
    // A product of whatever is there before the first step, and not used.
    issue_share(one, 0, mine ^ 1);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(acc);
    ptx::fence_operands(p_half);
    ptx::fence_operands(one);
    arrive(base + S::kQEmpty + 8 * mine);
    arrive(base + S::kDOEmpty + 8 * mine);
    if constexpr (S::kTake == 2) {
      issue_share(two, 1, mine ^ 1);
      if (step > 0) add(one, 0, step - 1, before, keys_too);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(two);
    }
    float three[2][S::kPartM / 8][2];
    issue_share(three, 0, mine);
    if (step > 0) {
      add(S::kTake == 2 ? two : one, S::kTake - 1, step - 1, before, keys_too);
      arrive(base + S::kDSEmpty + 8 * (mine ^ 1));
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(three);
    float four[2][S::kPartM / 8][2];
    if constexpr (S::kTake == 2) {
      issue_share(four, 1, mine);
      add(three, 0, step, here, keys_too);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(four);
    }
    add(S::kTake == 2 ? four : three, S::kTake - 1, step, here, keys_too);
    arrive(base + S::kDSEmpty + 8 * mine);
    const bool more = step + 2 < piece.steps;
    float s_next[2][kGroups][2], dp_next[2][kGroups][2];  // after the last step not used
    if (more) wait_q(step + 2);
    issue_scores(s_next, mine);
    if (more) wait_do(step + 2);
    issue_dp(dp_next, mine);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(s_next);
    ptx::fence_operands(dp_next);
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      (&s[0][0][0])[i] = (&s_next[0][0][0])[i];
      (&dp[0][0][0])[i] = (&dp_next[0][0][0])[i];
    }
  };
#pragma unroll 1
  for (; step < piece.steps; step += 2) {
    if (in_keys() || !piece.plain(walk.block) || !plain_before) {
      advance(true);
    } else {
      advance(false);
    }
    walk.next(piece);
    next();
  }
  if (step > 0 && step == piece.steps) {  // the last step was the other's
    wait_ds(step - 1);
    add_others(step - 1);
    issue_others(mine ^ 1);
    float share[2][S::kPartM / 8][2];
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(acc);
#pragma unroll
    for (int i = 0; i < S::kTake; ++i) {
      issue_share(share, i, mine ^ 1);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(share);
      add(share, i, step - 1, before, in_keys());
    }
  }

  // -- dV or dK: in halves through the place of V or K ---------------------------------------
  if constexpr (kFloatOut) {
    const i32 rows = band.n_k - piece.first_key;
    if (mine == 0) {
      write_rows(static_cast<float*>(params.dv) +
                     params.dv_strides.at(piece.batch, piece.kv_head, piece.first_key),
                 params.dv_strides.row, rows, params.d_v, acc, 1.0f, thread);
    } else {
      write_rows(static_cast<float*>(params.dk) +
                     params.dk_strides.at(piece.batch, piece.kv_head, piece.first_key),
                 params.dk_strides.row, rows, params.d, acc, params.scale, thread);
    }
  } else {
    ptx::bar_sync(kBoth, kConsumers);  // both have read K and V
    if (mine == 0) {
      stage_rows<Half, V, S::kDv / 8>(base + S::kV, 0, acc, 1.0f, thread);
    } else {
      stage_rows<Half, K, S::kD / 8>(base + S::kK, 0, acc, params.scale, thread);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(kWarpgroup + mine, 128);
    if (thread == 0) {
      const ptx::TensorMap& map = mine == 0 ? params.dv_map : params.dk_map;
      const u32 from = base + (mine == 0 ? S::kV : S::kK);
      for (int i = 0; i < (mine == 0 ? V::kCount : K::kCount); ++i)
        ptx::tma_store_4d(from + i * kBlockN * kPanelPitch, map, i * kPanelCols, piece.first_key,
                          piece.kv_head, piece.batch);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
    }
  }
}

}  // namespace cuflash::sm90

// dQ, dK and dV on Hopper in one pass, head dimensions above 128. A CTA takes 64 keys of one key
// head and walks all rows that see them, of all query heads of the group, in ascending order, 64 a
// step. Of two consumer warpgroups the first accumulates dV and the second dK. They take turns in
// making P and dS of a step: one computes while products of the other's step run. What the maker
// has in registers it multiplies from there, the other from shared memory. Each adds its columns of
// dQ from registers; where it is centred, one more warp adds sums of the rows of dS. As in
// sm90/backward.cu a CTA goes on to the next tile that nobody has taken, whose first Q and dO come
// while it ends the one before; a CTA that finds none when it starts converts dQ. See sm90/sums.cuh
// for the order of dQ and why every wait for other CTAs ends.
#include "sm90/convert.cuh"
#include "sm90/wide_shape.cuh"

namespace cuflash::sm90 {

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

  using Tile = Piece<kBlockM, kBlockN>;
  // The tile of a round, of the two that may be, or that there is none any more.
  auto tile_at = [&](u32 round) { return base + S::kTile + round * Tile::kBytes; };

  if (threadIdx.x == 0) {
    init_wide_barriers<S, kCenter>(base);
    Tile(params, atomicAdd(params.tickets, 1)).store(tile_at(0));
  }
  __syncthreads();
  if (Tile::field(tile_at(0), &Tile::ticket) >= params.pieces) {
    convert<S, kFloatOut, kCenter>(params, base + S::kInKeysAt, base + S::kNextFull,
                                   reinterpret_cast<float*>(shared));
    return;
  }
  // Of earlier tiles, in one word: bits 0 and 1 whether stage 0 and 1 have had an odd number of
  // steps, since a tile may leave them apart; kRound how many tiles, modulo 2.
  u32 count = 0;
  constexpr u32 kRound = 4;
  auto round = [&] { return count / kRound; };
  auto parity_of = [&](i32 step) { return (step / 2 ^ count >> step % 2) % 2; };
  auto count_on = [&](i32 steps) { count ^= kRound | (steps + 1) / 2 % 2 | steps / 2 % 2 * 2; };
  // Waits for the next tile and only then lets go of this one: so neither barrier can be a phase
  // ahead of who waits for it.
  auto next_tile = [&](i32 steps) {
    ptx::mbarrier_wait(base + S::kNextFull, ptx::opaque(count) / kRound);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(base + S::kNextEmpty);
    count_on(steps);
  };

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<S::kLoaderRegs + (kCenter ? S::kSumRegs : 0)>();
    const int warp = threadIdx.x / 32;
    auto block_at = [&](const Tile& piece, const Walk& walk) {
      const i32 blocks = (band.n_q + kBlockM - 1) / kBlockM;
      return (piece.batch * params.heads + walk.head) * blocks + walk.block;
    };
    if constexpr (kCenter) {
      // -- A whole warp that adds the sums of rows of dS -----------------------------------------
      while (warp == 3 && Tile::field(tile_at(round()), &Tile::ticket) < params.pieces) {
        const i32 steps = Tile::field(tile_at(round()), &Tile::steps);
        for (i32 step = 0; step < steps; ++step) {
          const u32 stage = step % 2, parity = parity_of(step);
          WarpRowSums<S> rows;
          bool any;
          {
            const Tile piece(tile_at(round()));
            any = Centered::of(params, piece.batch, piece.kv_head)
                      .any<kBlockM>(Walk::at(piece, params.group, step).block * kBlockM);
          }
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
        next_tile(steps);
      }
    }
    if (lane != 0) return;
    // One thread of each other warp. What of a tile one step needs is not kept for the next: 24
    // registers are few.
    auto tile = [&] { return Tile(tile_at(round())); };
    auto next_of_one = [&](i32 steps) {
      ptx::mbarrier_wait(base + S::kNextFull, round());
      ptx::mbarrier_arrive(base + S::kNextEmpty);
      count_on(steps);
    };
    if (warp == 0) {
      // -- The loader: K and V of a tile once, Q and dO of every step with LSE and delta ---------
      Walk walk = {};
      auto load_step = [&](i32 step) {
        const Tile piece = tile();
        const u32 base = ptx::opaque(ptx::shared_address(shared));
        const u32 stage = step % 2, parity = parity_of(step) ^ 1;
        const i32 row = walk.block * kBlockM;
        auto load_row = [&](u32 to, const float* from, u32 full) {
          const i64 head = piece.batch * params.heads + walk.head;
          ptx::bulk_load(to, from + head * params.pitch + row, kBlockM * 4, full);
        };
        const u32 q_full = base + S::kQFull + 8 * stage, do_full = base + S::kDOFull + 8 * stage;
        ptx::mbarrier_wait(base + S::kQEmpty + 8 * stage, parity);
        // Told with Q: the block of rows, and whether it is cut.
        ptx::st_shared(base + S::kMarkAt + 4 * stage, walk.block * 2 + !piece.plain(walk.block));
        ptx::mbarrier_arrive_expect_tx(q_full, Q::kBytes + kBlockM * 4);
        load_panels<Q>(params.q_map, base + S::kQ + stage * Q::kBytes, q_full, row, walk.head,
                       piece.batch);
        load_row(base + S::kLse + stage * kBlockM * 4, params.lse2, q_full);
        ptx::mbarrier_wait(base + S::kDOEmpty + 8 * stage, parity);
        ptx::mbarrier_arrive_expect_tx(do_full, DO::kBytes + kBlockM * 4);
        load_panels<DO>(params.dout_map, base + S::kDO + stage * DO::kBytes, do_full, row,
                        walk.head, piece.batch);
        load_row(base + S::kDelta + stage * kBlockM * 4, params.delta, do_full);
        walk.next(piece);
      };
      while (ptx::ld_shared(tile_at(round())) < params.pieces) {
        walk = Walk::at(tile(), params.group, 0);
        if (tile().steps > 0) load_step(0);
        const Tile piece = tile();
        const u32 full = base + S::kKeysFull;
        ptx::mbarrier_wait(base + S::kKeysEmpty, round() ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, K::kBytes + V::kBytes);
        load_panels<K>(params.k_map, base + S::kK, full, piece.first_key, piece.kv_head,
                       piece.batch);
        load_panels<V>(params.v_map, base + S::kV, full, piece.first_key, piece.kv_head,
                       piece.batch);
        for (i32 step = 1; step < tile().steps; ++step) load_step(step);
        const Tile next(params, atomicAdd(params.tickets, 1));
        ptx::mbarrier_wait(base + S::kNextEmpty, round() ^ 1);
        count_on(tile().steps);
        next.store(tile_at(round()));
        ptx::mbarrier_arrive(base + S::kNextFull);
      }
    } else if (warp == 1) {
      // -- Waits for this tile's turns, a step or two ahead --------------------------------------
      while (ptx::ld_shared(tile_at(round())) < params.pieces) {
        const i32 steps = tile().steps;
        for (i32 step = 0; step < steps; ++step) {
          const Tile piece = tile();
          const Walk walk = Walk::at(piece, params.group, step);
          const i32 turn = turn_of<kBlockM, kBlockN>(params, piece.tile, walk.block);
          const i32 at = block_at(piece, walk);
          i32 found = 0;
          if (turn > 0) {
            do {
              found = ptx::ld_relaxed_gpu(params.turns + at);
            } while ((found & ~kSmall) != turn);
            ptx::fence_acquire_gpu();
          }
          ptx::mbarrier_wait(base + S::kTold + 8 * (step % 2), parity_of(step) ^ 1);
          ptx::st_shared(base + S::kFoundAt + 4 * (step % 2), found);
          ptx::st_shared(base + S::kBlockAt + 4 * (step % 2), at);
          ptx::mbarrier_arrive(base + S::kTurnCome + 8 * (step % 2));
        }
        next_of_one(steps);
      }
    } else if (warp == 2) {
      // -- Says what has been added --------------------------------------------------------------
      while (ptx::ld_shared(tile_at(round())) < params.pieces) {
        const i32 steps = tile().steps;
        for (i32 step = 0; step < steps; ++step) {
          ptx::mbarrier_wait(base + S::kAdded + 8 * (step % 2), parity_of(step));
          const i32 found = ptx::ld_shared(base + S::kFoundAt + 4 * (step % 2));
          const i32 small =
              ptx::ld_shared(base + S::kSmallAt + 4 * (step % 2)) == step ? kSmall : 0;
          ptx::st_shared(base + S::kSmallAt + 4 * (step % 2), -1);  // not of a later tile's step
          const i32 at = ptx::ld_shared(base + S::kBlockAt + 4 * (step % 2));
          ptx::st_release_gpu(params.turns + at, found + 1 | small);
          ptx::mbarrier_arrive(base + S::kTold + 8 * (step % 2));
        }
        next_of_one(steps);
      }
    }
    return;
  }

  // -- Consumers -----------------------------------------------------------------------------
  ptx::setmaxnreg_inc<S::kConsumerRegs - (kCenter ? S::kSumRegs : 0)>();
  while (Tile::field(tile_at(round()), &Tile::ticket) < params.pieces) {
    // What is rarely asked for, or in the end, is read again then.
    auto piece = [&] { return Tile(tile_at(round())); };
    auto walk_of = [&](i32 step) { return Walk::at(piece(), params.group, step); };
    const i32 steps = Tile::field(tile_at(round()), &Tile::steps);
    auto mark_of = [&](i32 step) { return load_alike(base + S::kMarkAt + 4 * (step % 2)); };
    const int mine = warpgroup - 1, thread = ptx::thread_index() % 128, lane = thread % 32;
    auto place = [] { return Place::of(ptx::thread_index() % 128); };
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
      issue_columns<kBf16, K, Q, S::kD>(s, ptx::opaque(descriptor(base + S::kK, 16)),
                                        descriptor(base + S::kQ + stage * Q::kBytes, 16));
      ptx::wgmma_commit_group();
    };
    auto issue_dp = [&](Accumulator<kGroups>& dp, u32 stage) {
      ptx::fence_operands(dp);
      ptx::wgmma_fence();
      issue_columns<kBf16, V, DO, S::kDv>(dp, ptx::opaque(descriptor(base + S::kV, 16)),
                                          descriptor(base + S::kDO + stage * DO::kBytes, 16));
      ptx::wgmma_commit_group();
    };
    auto wait_q = [&](i32 step) {
      ptx::mbarrier_wait(base + S::kQFull + 8 * (step % 2), parity_of(step));
    };
    auto wait_do = [&](i32 step) {
      ptx::mbarrier_wait(base + S::kDOFull + 8 * (step % 2), parity_of(step));
    };
    auto wait_ds = [&](i32 step) {
      ptx::mbarrier_wait(base + S::kDSFull + 8 * (step % 2), parity_of(step));
    };
    // dV += P^T dO or dK += dS^T Q: of the other's step, and of one's own.
    auto rows_of = [&](u32 stage) {
      static_assert(DO::kPanelBytes == Q::kPanelBytes, "as many rows");
      const u32 rows = mine == 0 ? S::kDO + stage * DO::kBytes : S::kQ + stage * Q::kBytes;
      return descriptor(base + rows, Q::kPanelBytes);
    };
    auto issue_others = [&](u32 stage) {
      ptx::fence_operands(acc);
      ptx::wgmma_fence();
      const u32 weights = base + S::kP + mine * DS::kBytes;  // P, or dS of the first stage
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
    // What the specials of the other's step do to dV or dK, if it has some. They have been taken
    // out of Q and dO.
    auto add_others = [&](i32 step) {
      const u32 stage = step % 2;
      if ((mark_of(step) & 1) == 0 || !params.masked) return;
      const bool some = lane == 0 && ptx::ld_shared(base + S::kSpecialAt + 4 * stage) != 0;
      if (!__any_sync(kWholeWarp, some)) return;
      specials.add_rows_of(acc, piece(), shared + (mine == 0 ? S::kP : S::kDS + stage * DS::kBytes),
                           walk_of(step), 0, mine == 0);
    };
    // dQ: 64 columns of the head by all queries, or half of them if there are no more columns.
    auto issue_share = [&](Accumulator<S::kPartM / 8>& share, int i, u32 stage) {
      const int part = mine * S::kTake + i;
      const u32 k = base + S::kK + (K::kCount == 1 ? 0 : part * K::kPanelBytes),
                ds = base + S::kDS + stage * DS::kBytes +
                     (K::kCount == 1 ? part * S::kPartM * kPanelPitch : 0);
      ptx::fence_operands(share);
      ptx::wgmma_fence();
      issue_transposed<kBf16, DS, kBlockN>(share, ptx::opaque(descriptor(k, 16)),
                                           descriptor(ds, 16));
      ptx::wgmma_commit_group();
    };
    auto add = [&](Accumulator<S::kPartM / 8>& share, int i, i32 step, bool keys_too) {
      const int part = mine * S::kTake + i;
      const u32 stage = step % 2;
      if (part < S::kParts) {
        if (keys_too)
          specials.add_keys(share, piece(), shared + S::kDS + stage * DS::kBytes,
                            walk_of(step).block, K::kCount == 1 ? 0 : part * kPanelCols,
                            K::kCount == 1 ? part * S::kPartM : 0);
        const bool small = holds_small(share);
        // Behind this wait, what was said here two steps ago of small numbers has been read.
        if (i == 0) ptx::mbarrier_wait(base + S::kTurnCome + 8 * stage, parity_of(step));
        if (small && lane == 0) ptx::st_shared(base + S::kSmallAt + 4 * stage, step);
        const i32 found = ptx::ld_shared(base + S::kFoundAt + 4 * stage);
        const i32 at = ptx::ld_shared(base + S::kBlockAt + 4 * stage);
        float* const sums =
            params.sums + (static_cast<i64>(at) * S::kParts + part) * (S::kPartM * 64) + thread * 4;
        add_registers(sums, share, found == 0, (found & kSmall) != 0 || small);
      }
      if (i < S::kTake - 1) return;
      __syncwarp();
      arrive(base + S::kAdded + 8 * stage);
    };

    const u32 own_ds = base + S::kDS + mine * DS::kBytes;
    // Steps of one's own have the stage `mine`.
    i32 step = mine;
    ptx::mbarrier_wait(base + S::kKeysFull, round());
    if (steps > 0) {
      if (params.masked) specials.look_at_keys();
      if (specials.in_keys) specials.clear_keys();
      if constexpr (kCenter) {
        if (thread == 0) ptx::st_shared(in_keys_at, specials.in_keys);
        ptx::bar_sync(kWarpgroup + mine, 128);
      }
    }

    // A step of one's own, and what is left of the one before, the other's.
    auto advance = [&](bool any) __attribute__((always_inline)) {
      float s[2][kGroups][2], dp[2][kGroups][2];
      issue_scores(s, mine);
      wait_do(step);
      issue_dp(dp, mine);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(s);
      ptx::fence_operands(dp);
      const bool plain = !any || (mark_of(step) & 1) == 0;
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
      if (any && in_keys()) specials.add_to_scores(s, piece(), walk_of(step), 0);
      u32 p_half[kGroups / 2][4], ds_half[kGroups / 2][4];
      Seen<kGroups> seen;
      if (!plain)
        look<kGroups>(seen, place(),
                      RowsOfKey{band, mark_of(step) / 2 * kBlockM,
                                Tile::field(tile_at(round()), &Tile::first_key)});
#pragma unroll
      for (int kk = 0; kk < kGroups / 2; ++kk) {
        const u32 rows = (mine * kBlockM + 16 * kk + place().column) * 4;
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
      ptx::mbarrier_wait(base + S::kDSEmpty + 8 * mine, parity_of(step) ^ 1);
      if (special && mine == 0) {  // P takes the place of dS for a while
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(acc);
        store_transposed<DS>(own_ds, p_half, 0, thread);
        ptx::bar_sync(kWarpgroup + mine, 128);
        specials.add_rows_of(acc, piece(), shared + (own_ds - base), walk_of(step), 0, true);
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
        specials.add_rows_of(acc, piece(), shared + (own_ds - base), walk_of(step), 0, false);
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
        if (step > 0) add(one, 0, step - 1, keys_too);
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(two);
      }
      float three[2][S::kPartM / 8][2];
      issue_share(three, 0, mine);
      if (step > 0) {
        add(S::kTake == 2 ? two : one, S::kTake - 1, step - 1, keys_too);
        arrive(base + S::kDSEmpty + 8 * (mine ^ 1));
      }
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(three);
      float four[2][S::kPartM / 8][2];
      if constexpr (S::kTake == 2) {
        issue_share(four, 1, mine);
        add(three, 0, step, keys_too);
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(four);
      }
      add(S::kTake == 2 ? four : three, S::kTake - 1, step, keys_too);
      arrive(base + S::kDSEmpty + 8 * mine);
    };
#pragma unroll 1
    for (; step < steps; step += 2) {
      wait_q(step);
      const bool cut = ((mark_of(step) | (step > 0 ? mark_of(step - 1) : 0)) & 1) != 0;
      if (in_keys() || cut) {
        advance(true);
      } else {
        advance(false);
      }
    }
    if (step > 0 && step == steps) {  // the last step was the other's
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
        add(share, i, step - 1, in_keys());
      }
      arrive(base + S::kQEmpty + 8 * (mine ^ 1));
      arrive(base + S::kDOEmpty + 8 * (mine ^ 1));
      arrive(base + S::kDSEmpty + 8 * (mine ^ 1));
    }

    // -- dV or dK: in halves through the place of V or K ---------------------------------------
    const Tile done = piece();
    if constexpr (kFloatOut) {
      if (mine == 0) {
        store_rows(params.dv, params.dv_strides, done, band.n_k, params.d_v, acc, 1.0f, 0);
      } else {
        store_rows(params.dk, params.dk_strides, done, band.n_k, params.d, acc, params.scale, 0);
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
          ptx::tma_store_4d(from + i * kBlockN * kPanelPitch, map, i * kPanelCols, done.first_key,
                            done.kv_head, done.batch);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read<0>();
      }
    }
    __syncwarp();  // all lanes have K and V of this tile behind them
    arrive(base + S::kKeysEmpty);
    next_tile(steps);
  }
}

}  // namespace cuflash::sm90

// dQ, dK and dV on Hopper in one pass, head dimensions up to 128: TMA, wgmma, warp specialisation.
// A CTA takes 128 keys of one key head, 64 for each of its two consumer warpgroups, which keep
// their dK and dV in registers, and walks all rows that see them, of all query heads of the group,
// in ascending order. One warp loads, two add the shares of dQ and, where it is centred, the sums
// of the rows of dS, one looks ahead for what is rare. A CTA goes on to the next tile that nobody
// has taken, whose first loads it asks for while it ends the one before; a CTA that finds none
// when it starts converts dQ. See sm90/sums.cuh for the order of dQ and why every wait for other
// CTAs ends.
#include "sm90/backward_shape.cuh"
#include "sm90/convert.cuh"

namespace cuflash::sm90 {

// kCenter: dQ is centred; not under a softcap.
template <class S, bool kSoftcap, bool kFloatOut, bool kCenter>
__global__ void __launch_bounds__(kThreads, 1)
    backward(const __grid_constant__ BackwardParams params) {
  using Half = typename S::Half;
  using Q = typename S::Q;
  using DO = typename S::DO;
  using K = typename S::K;
  using V = typename S::V;
  using DS = typename S::DS;
  using Tile = Piece<S::kBlockM, S::kBlockN>;
  constexpr int kBlockM = S::kBlockM, kBlockN = S::kBlockN, kGroups = kBlockM / 8;
  constexpr bool kBf16 = S::kBf16;
  extern __shared__ __align__(1024) char shared[];
  const u32 base = ptx::shared_address(shared);
  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const Band& band = params.band;

  // The tile of a round, of the two that may be, or that there is none any more.
  auto tile_at = [&](u32 round) { return base + S::kTile + round * Tile::kBytes; };
  auto is_tile = [&](u32 round) {
    return Tile::field(tile_at(round), &Tile::ticket) < params.pieces;
  };

  if (threadIdx.x == 0) {
    init_barriers<S, kCenter>(base);
    Tile(params, atomicAdd(params.tickets, 1)).store(tile_at(0));
  }
  if constexpr (kCenter) write_ones<Half>(base + S::kOnes, threadIdx.x);
  __syncthreads();
  if (!is_tile(0)) {
    convert<S, kFloatOut, kCenter>(params, base + S::kInK, base + S::kNextFull,
                                   reinterpret_cast<float*>(shared));
    return;
  }
  i32 step = 0;   // of all tiles of this CTA: stages and parities of barriers go on
  u32 round = 0;  // parity of its tiles
  auto round_of = [](u32 state) { return state / kRound % 2; };
  // Waits for the next tile and only then lets go of this one: so neither barrier can be a phase
  // ahead of who waits for it.
  auto next_tile = [&](u32 round) {
    ptx::mbarrier_wait(base + S::kNextFull, round);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(base + S::kNextEmpty);
  };
  auto mark_at = [&](i32 step) { return base + S::kMark + 12 * (step % S::kMarks); };
  auto mark_of = [&](i32 step) -> u32 { return load_alike(mark_at(step)); };

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<S::kLoaderRegs>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
      // -- The loader: K and V of a tile once, Q and dO of every step with LSE and delta ---------
      // What of a tile one step needs is not kept for the next: 24 registers are few.
      Walk walk = {};
      auto load_step = [&] {
        const Tile piece(tile_at(round));
        const u32 base = ptx::opaque(ptx::shared_address(shared));
        const u32 stage = step % 2, parity = step / 2 % 2 ^ 1;
        const i32 row = walk.block * kBlockM;
        auto load_row = [&](u32 to, const float* from, u32 full) {
          const i64 head = piece.batch * params.heads + walk.head;
          ptx::bulk_load(to, from + head * params.pitch + row, kBlockM * 4, full);
        };
        const u32 q_full = base + S::kQFull + 8 * stage, do_full = base + S::kDOFull + 8 * stage;
        ptx::mbarrier_wait(base + S::kQEmpty + 8 * stage, parity);
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
        ++step;
      };
      while (ptx::ld_shared(tile_at(round)) < params.pieces) {
        walk = Walk::at(Tile(tile_at(round)), params.group, 0);
        const i32 end = step + Tile(tile_at(round)).steps;
        if (step < end) load_step();
        const Tile piece(tile_at(round));
        const u32 full = base + S::kKeysFull;
        ptx::mbarrier_wait(base + S::kKeysEmpty, round ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, K::kBytes + V::kBytes);
        load_panels<K>(params.k_map, base + S::kK, full, piece.first_key, piece.kv_head,
                       piece.batch);
        load_panels<V>(params.v_map, base + S::kV, full, piece.first_key, piece.kv_head,
                       piece.batch);
        while (step < end) load_step();
        const Tile next(params, atomicAdd(params.tickets, 1));
        ptx::mbarrier_wait(base + S::kNextEmpty, round ^ 1);
        round ^= 1;
        next.store(tile_at(round));
        ptx::mbarrier_arrive(base + S::kNextFull);
      }
    } else if (warp == 1 || warp == 2) {
      // -- Two warps that add dQ, step after step in turn ----------------------------------------
      const u32 mine = __shfl_sync(kWholeWarp, warp - 1, 0);  // known to be alike in all lanes
      for (; is_tile(round); next_tile(round), round ^= 1) {
        const i32 end = step + Tile::field(tile_at(round), &Tile::steps);
        for (; step < end; ++step) {
          if (step % 2 != mine) continue;
          RowShare<S, kCenter> rows;
          ptx::mbarrier_wait(base + S::kShareFull + 8 * mine, step / 2 % 2);
          if (const u32 mark = kCenter ? mark_of(step) : 0; (mark & kCentered) != 0) {
            ptx::mbarrier_wait(base + S::kRowsFull, mark % 2);
            rows.take(base + S::kRows);
            ptx::mbarrier_arrive(base + S::kRowsEmpty);
          }
          add_share<S::kShareBytes, kBlockM>(
              params, load_alike(mark_at(step) + 4), load_alike(mark_at(step) + 8),
              base + S::kShare + mine * S::kShareBytes, base + S::kShareEmpty + 8 * mine, rows);
        }
      }
    } else if (warp == 3) {
      // -- One that looks for what is rare --------------------------------------------------------
      u32 state = 0;  // kRound, kLooked, and a bit that changes with each centred step
      for (; is_tile(round_of(state));
           next_tile(round_of(state)), state = (state ^ kRound) & ~kLooked) {
        const i32 end = step + Tile::field(tile_at(round_of(state)), &Tile::steps);
        auto look_at = [&](i32 of_step) {  // keeps nothing for the next, for want of registers
          const Tile piece(tile_at(round_of(state)));
          const Walk walk = Walk::at(piece, params.group, of_step - end + piece.steps);
          auto tell = [&](int word, i32 x) {
            if (lane == 0) ptx::st_shared(mark_at(of_step) + 4 * word, x);
          };
          const i32 blocks = (band.n_q + kBlockM - 1) / kBlockM;
          tell(1, (piece.batch * params.heads + walk.head) * blocks + walk.block);
          tell(2, turn_of<kBlockM, kBlockN>(params, piece.tile, walk.block));
          u32 mark = mark_rows<kSoftcap>(params, piece, walk);
          if constexpr (kCenter) {
            const auto centered = Centered::of(params, piece.batch, piece.kv_head);
            if (centered.template any<kBlockM>(walk.block * kBlockM)) {
              mark |= kCentered | (state & 1);
              state ^= 1;
            }
          }
          tell(0, static_cast<i32>(mark));
        };
        // With dO of a step the next one's mark is told, too: one that comes later would be waited
        // for. What K holds matters behind the first step.
        if (step < end) look_at(step);
        do {
          if (step + 1 < end) look_at(step + 1);
          if (step < end) {
            ptx::mbarrier_wait(base + S::kDOEmpty + 8 * (step % 2), step / 2 % 2 ^ 1);
            ptx::mbarrier_arrive(base + S::kDOFull + 8 * (step % 2));
          }
          if (params.masked && (state & kLooked) == 0) {
            state |= kLooked;
            ptx::mbarrier_wait(base + S::kKeysFull, round_of(state));
            const bool found =
                __any_sync(kWholeWarp, finds_nonfinite<Half, K::kBytes, 32>(shared + S::kK, lane));
            if (lane == 0) ptx::st_shared(base + S::kInK, found ? kInKeys : 0);
            ptx::mbarrier_arrive(base + S::kLookedAt);
          }
        } while (++step < end);
        step = end;
      }
    }
    return;
  }

  // -- Consumers: 64 keys each ---------------------------------------------------------------
  ptx::setmaxnreg_inc<S::kConsumerRegs>();
  if (warpgroup == 2) ptx::bar_arrive(kTurn, kConsumers);
  u32 state = 0;
  for (; is_tile(round_of(state)); next_tile(round_of(state)), state = (state & kRound) ^ kRound) {
    const int mine = warpgroup - 1, thread = ptx::thread_index() % 128, lane = thread % 32;
    const u32 k_rows = descriptor(base + S::kK + mine * 64 * kPanelPitch, 16),
              v_rows = descriptor(base + S::kV + mine * 64 * kPanelPitch, 16),
              k_columns = descriptor(base + S::kK + mine * S::kColumnsBytes, 16);
    const u32 ds_queries = mine * S::kQueriesBytes;
    auto arrive = [&](u32 barrier) {
      if (lane == 0) ptx::mbarrier_arrive(barrier);
    };
    auto wait = [&](u32 full, i32 step) {
      ptx::mbarrier_wait(base + full + 8 * (step % 2), step / 2 % 2);
    };
    auto issue_scores = [&](Accumulator<kGroups>& s, i32 step) {
      ptx::fence_operands(s);
      ptx::wgmma_fence();
      issue_columns<kBf16, K, Q, S::kD>(s, ptx::opaque(k_rows),
                                        descriptor(base + S::kQ + step % 2 * Q::kBytes, 16));
      ptx::wgmma_commit_group();
    };
    // dQ of a step: K^T dS^T, 64 columns of the head by kPartM queries.
    auto issue_share = [&](Accumulator<S::kPartM / 8>& dq, i32 step) {
      ptx::fence_operands(dq);
      ptx::wgmma_fence();
      issue_transposed<kBf16, DS, kBlockN>(
          dq, ptx::opaque(k_columns),
          descriptor(base + S::kDS + step % 2 * DS::kBytes + ds_queries, 16));
      ptx::wgmma_commit_group();
    };
    // Warpgroups take turns: one computes P and dS while the other's products run.
    auto wait_turn = [&] { ptx::bar_sync(kTurn + mine, kConsumers); };
    auto pass_turn = [&] { ptx::bar_arrive(kTurn + (mine ^ 1), kConsumers); };
    // Sums of rows of dS, where the block has a centred row: of this warpgroup's queries, or, of
    // blocks of up to 64, of all by the first one, which reads 64 rows.
    constexpr bool kBothSum = kBlockM == 128;
    auto sum_rows = [&](u32 mark, i32 of_step) {
      float rows[2][1][2];
      const u32 tile = base + S::kDS + of_step % 2 * DS::kBytes + (kBothSum ? ds_queries : 0);
      make_row_sums<kBf16, DS, kBlockN>(rows, descriptor(tile, 16), base + S::kOnes);
      arrive(base + S::kDSEmpty + 8 * (of_step % 2));
      ptx::mbarrier_wait(base + S::kRowsEmpty, mark % 2 ^ 1);
      store_row_sums<kBothSum, kBlockM>(base + S::kRows, rows);
      ptx::mbarrier_arrive(base + S::kRowsFull);
    };
    // dQ's way out, when its product has been waited for.
    auto hand_out = [&](Accumulator<S::kPartM / 8>& dq, i32 of_step, bool holds_ds) {
      const u32 i = of_step % 2, parity = of_step / 2 % 2;
      if (!holds_ds) arrive(base + S::kDSEmpty + 8 * i);
      ptx::mbarrier_wait(base + S::kShareEmpty + 8 * i, parity ^ 1);
      const u32 part = base + S::kShare + i * S::kShareBytes + mine * Part<S::kPartM>::kBytes;
      store_share(Part<S::kPartM>::of(part, thread), dq);
    };
    auto tell = [&](i32 of_step) {
      ptx::fence_proxy_async();
      __syncwarp();
      arrive(base + S::kShareFull + 8 * (of_step % 2));
    };
    auto is_summed = [&](u32 mark) {
      return kCenter && (mark & kCentered) != 0 && (kBothSum || mine == 0);
    };
    float s[2][kGroups][2];  // of the next step, if that is made ahead
    auto scores_of = [&](i32 step) {
      if constexpr (S::kAhead) {
        wait(S::kQFull, step);
        issue_scores(s, step);
        ptx::wgmma_wait_group<0>();
        ptx::fence_operands(s);
      }
    };

    // What is rarely asked for, or in the end, is read again then.
    auto piece = [&] { return Tile(tile_at(round_of(state))); };
    auto field = [&](i32 Tile::* which) { return Tile::field(tile_at(round_of(state)), which); };
    const i32 last = step + field(&Tile::steps) - 1;
    auto walk_of = [&](i32 step) {
      const Tile here = piece();
      return Walk::at(here, params.group, step - last + here.steps - 1);
    };
    Specials<S> specials(params, shared, mine);
    float dk[2][S::kD / 8][2], dv[2][S::kDv / 8][2];
    clear(dk);
    clear(dv);
    // What NaN and Inf in K do to dQ.
    auto add_keys = [&](Accumulator<S::kPartM / 8>& dq, i32 of_step) {
      if ((state & kInKeys) == 0) return;
      specials.add_keys(dq, piece(), shared + S::kDS + of_step % 2 * DS::kBytes,
                        walk_of(of_step).block, K::kCount == 2 ? mine * kPanelCols : 0,
                        K::kCount == 2 ? 0 : mine * S::kPartM);
      __syncwarp();  // all lanes have read dS
    };
    // Behind the first step, since only dQ, a step later, needs K without NaN and Inf.
    auto look_at_keys = [&] {
      state |= kLooked;
      if (!params.masked) return;
      ptx::mbarrier_wait(base + S::kLookedAt, round_of(state));
      state |= load_alike(base + S::kInK);
      if ((state & kInKeys) == 0) return;
      specials.clear_keys();
      if (step <= last) scores_of(step);
    };
    ptx::mbarrier_wait(base + S::kKeysFull, round_of(state));
    if (step <= last) scores_of(step);
    if constexpr (!kFloatOut && S::kDkInDs) {  // dS's place: what was dK's has left
      if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
      ptx::bar_sync(kWarpgroup + mine, 128);
    }

    // What a usual step does not need is not in its loop: a long one starves for instructions.
    auto advance = [&](Step kind) __attribute__((always_inline)) {
      const bool any = kind == Step::kAny;
      const u32 stage = step % 2, parity = step / 2 % 2;
      const u32 do_tile = base + S::kDO + stage * DO::kBytes;
      const bool plain = kind == Step::kUsual || (any && (state & kCut << kHere) == 0);
      float dp[2][kGroups][2], slope[2][kSoftcap ? kGroups : 1][2];
      u32 p_half[kGroups / 2][4], ds_half[kGroups / 2][4];
      if constexpr (!S::kAhead) {
        wait(S::kQFull, step);
        issue_scores(s, step);
      }
      wait(S::kDOFull, step);
      ptx::fence_operands(dp);
      ptx::wgmma_fence();
      issue_columns<kBf16, V, DO, S::kDv>(dp, ptx::opaque(v_rows), descriptor(do_tile, 16));
      ptx::wgmma_commit_group();
      bool special = false;
      if (any && !plain && params.masked) {
        special = specials.template in_rows<kSoftcap>(stage);
        if (special) {
          ptx::wgmma_wait_group<0>();  // what was issued needs them
          ptx::fence_operands(s);
          ptx::fence_operands(dp);
          specials.clear_rows(stage);
        }
      }
      auto place = [] { return Place::of(ptx::thread_index() % 128); };  // no register is left
      Seen<kGroups> seen;
      if (!plain) {
        look<kGroups>(seen, place(),
                      RowsOfKey{band, static_cast<i32>(mark_of(step) >> kBlockBits) * kBlockM,
                                field(&Tile::first_key) + mine * 64});
      }
      wait_turn();
      if constexpr (!S::kAhead) {
        ptx::wgmma_wait_group<1>();
        ptx::fence_operands(s);
      }
      if (any && (state & kInKeys) != 0)
        specials.add_to_scores(s, piece(), walk_of(step), mine * 64);
      probabilities<kSoftcap>(s, slope, base + S::kLse + (stage * kBlockM + place().column) * 4,
                              params);
      if (!plain) clear_unseen(s, seen);
      pack<Half>(p_half, s);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dp);
      score_gradients<kSoftcap>(dp, s, slope,
                                base + S::kDelta + (stage * kBlockM + place().column) * 4);
      if (!plain) clear_unseen(dp, seen);
      pack<Half>(ds_half, dp);
      const u32 ds_tile = base + S::kDS + stage * DS::kBytes;
      ptx::mbarrier_wait(base + S::kDSEmpty + 8 * stage, parity ^ 1);
      if (special) {  // P takes the place of dS for a while
        store_transposed<DS>(ds_tile, p_half, mine * 64, thread);
        ptx::bar_sync(kWarpgroup + mine, 128);
        specials.add_rows_of(dv, piece(), shared + (ds_tile - base), walk_of(step), mine * 64,
                             true);
        ptx::bar_sync(kWarpgroup + mine, 128);
      }
      store_transposed<DS>(ds_tile, ds_half, mine * 64, thread);
      if (special) {
        ptx::bar_sync(kWarpgroup + mine, 128);
        specials.add_rows_of(dk, piece(), shared + (ds_tile - base), walk_of(step), mine * 64,
                             false);
      }
      ptx::fence_proxy_async();
      pass_turn();
      ptx::fence_operands(dv);
      ptx::fence_operands(p_half);
      ptx::wgmma_fence();
      issue_rows<kBf16>(dv, p_half, descriptor(do_tile, DO::kPanelBytes));
      ptx::wgmma_commit_group();
      __syncwarp();
      arrive(base + S::kDSFull + 8 * stage);
      if (S::kAhead && step < last) wait(S::kQFull, step + 1);
      if ((state & kBegun) != 0) wait(S::kDSFull, step - 1);

      // dK, and dQ of the step before, for which the other warpgroup has meanwhile written its dS,
      // too. Of no step before the first, and of S none behind the last, they are products of
      // whatever is there, and not used.
      float dq[2][S::kPartM / 8][2];
      auto issue_dk = [&] {
        ptx::fence_operands(dk);
        ptx::fence_operands(ds_half);
        ptx::wgmma_fence();
        issue_rows<kBf16>(dk, ds_half,
                          descriptor(base + S::kQ + stage * Q::kBytes, Q::kPanelBytes));
        ptx::wgmma_commit_group();
      };
      auto end_dv = [&] {
        ptx::fence_operands(dv);
        ptx::fence_operands(p_half);
        arrive(base + S::kDOEmpty + 8 * stage);
      };
      auto end_dk = [&] {
        ptx::fence_operands(dk);
        ptx::fence_operands(ds_half);
        arrive(base + S::kQEmpty + 8 * stage);
      };
      if constexpr (S::kAhead) {
        ptx::wgmma_wait_group<0>();
        end_dv();
        issue_dk();
        issue_share(dq, step + 1);
        issue_scores(s, step + 1);
      } else {
        issue_share(dq, step + 1);
        issue_dk();
      }
      const bool to_sum = any && (state & kBegun) != 0 && is_summed(state);
      state |= mark_of(step + 1) % (1 << kBlockBits) << kNext;
      ptx::wgmma_wait_group<1>();
      ptx::fence_operands(dq);
      if constexpr (S::kAhead) {
        end_dk();
      } else {
        end_dv();
      }
      if ((state & kBegun) != 0) {
        if (any) add_keys(dq, step - 1);
        hand_out(dq, step - 1, to_sum);
        if (!to_sum) tell(step - 1);
      }
      ptx::wgmma_wait_group<0>();
      if constexpr (S::kAhead) {
        ptx::fence_operands(s);
      } else {
        end_dk();
      }
      if (to_sum) {  // when no other product runs
        sum_rows(state, step - 1);
        tell(step - 1);
      }
      state =
          (state & kOfTile) | kBegun | (state >> kHere & (kCentered | 1)) | state >> kNext << kHere;
      ++step;
    };
    // K is looked at behind the first step.
    auto more = [&] { return step <= last && (state & (kBegun | kLooked)) != kBegun; };
    auto rare = [&] { return (state & (kCut << kHere | kInKeys | kCentered)) != 0; };
    if (step <= last) {
      wait(S::kDOFull, step);
      state |= mark_of(step) % (1 << kBlockBits) << kHere;
    }
    while (step <= last) {
#pragma unroll 1
      while (more() && rare()) {
        if ((state & (kCut << kHere | kInRows << kHere | kInKeys | kCentered)) != kCut << kHere) {
          advance(Step::kAny);
        } else {
          advance(Step::kMasked);
        }
      }
#pragma unroll 1
      while (more() && !rare()) advance(Step::kUsual);
      if ((state & kLooked) == 0) look_at_keys();
    }

    // -- dV through V's place, the last share, dK ----------------------------------------------
    const Tile done = piece();
    ptx::bar_sync(kWarpgroup + mine, 128);  // all its warps have read V
    if constexpr (kFloatOut) {
      store_rows(params.dv, params.dv_strides, done, band.n_k, params.d_v, dv, 1.0f, mine);
    } else {
      stage_rows<Half, V, S::kDv / 8>(base + S::kV, mine * 64, dv, 1.0f, thread);
      send_rows<V>(params.dv_map, base + S::kV, done, band.n_k, mine);
    }
    // Behind it the next K and V may come.
    auto free_keys = [&] {
      if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
      arrive(base + S::kKeysEmpty);
    };
    if ((state & kBegun) != 0) {
      float dq[2][S::kPartM / 8][2];
      wait(S::kDSFull, last);
      issue_share(dq, last);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(dq);
      if (kFloatOut || S::kDkInDs) free_keys();
      add_keys(dq, last);
      hand_out(dq, last, is_summed(state));
      if (is_summed(state)) sum_rows(state, last);
      tell(last);
    } else {
      look_at_keys();
      if (kFloatOut || S::kDkInDs) free_keys();
    }
    if constexpr (kFloatOut) {
      store_rows(params.dk, params.dk_strides, done, band.n_k, params.d, dk, params.scale, mine);
    } else {
      u32 to = base + S::kK;
      if constexpr (S::kDkInDs) {
        to = base + S::kDS + mine * (DS::kPanelBytes - 64 * kPanelPitch);
        for (i32 i = step; i < step + 2; ++i)  // dS of both stages has been read
          ptx::mbarrier_wait(base + S::kDSEmpty + 8 * (i % 2), i / 2 % 2 ^ 1);
      } else {
        ptx::bar_sync(kBoth, kConsumers);  // both have read K
      }
      stage_rows<Half, K, S::kD / 8>(to, mine * 64, dk, params.scale, thread);
      send_rows<K>(params.dk_map, to, done, band.n_k, mine);
      if constexpr (!S::kDkInDs) free_keys();
    }
  }
  if (threadIdx.x % 128 == 0) ptx::cp_async_bulk_wait_group_read<0>();
}

}  // namespace cuflash::sm90

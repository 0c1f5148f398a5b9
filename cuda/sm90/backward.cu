// dQ, dK and dV on Hopper in one pass, head dimensions up to 128: TMA, wgmma, warp specialisation.
// A CTA takes 128 keys of one key head, 64 for each of its two consumer warpgroups, which keep
// their dK and dV in registers, and walks all rows that see them, of all query heads of the group,
// in ascending order. One warp loads, two add the shares of dQ and, where it is centred, the sums
// of the rows of dS, one looks ahead for what is rare. CTAs behind the last tile of keys convert
// dQ. See sm90/sums.cuh for the order of dQ and why every wait for other CTAs ends.
#include "sm90/convert.cuh"
#include "sm90/specials.cuh"

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
  // Steps whose marks are kept: when that of step n + 8 is written, consumers have let go of dO of
  // step n + 6. So they have handed out step n + 4, in the place of n + 2, which the warp that adds
  // n and then n + 2 had read.
  static constexpr int kMarks = 8;
  // Shared memory, in bytes from its start.
  static constexpr u32 kK = 0, kV = kK + K::kBytes, kQ = kV + V::kBytes, kDO = kQ + 2 * Q::kBytes,
                       kDS = kDO + 2 * DO::kBytes, kShare = kDS + 2 * DS::kBytes,
                       kLse = kShare + 2 * kShareBytes, kDelta = kLse + 8 * kBlockM,
                       kRows = kDelta + 8 * kBlockM, kOnes = kRows + 4 * kBlockM,
                       kBarriers = kOnes + kOnesBytes;
  static constexpr u32 kKeysFull = kBarriers, kQFull = kKeysFull + 8, kQEmpty = kQFull + 16,
                       kDOFull = kQEmpty + 16, kDOEmpty = kDOFull + 16, kDSFull = kDOEmpty + 16,
                       kDSEmpty = kDSFull + 16, kShareFull = kDSEmpty + 16,
                       kShareEmpty = kShareFull + 16, kRowsFull = kShareEmpty + 16,
                       kRowsEmpty = kRowsFull + 8, kTicket = kRowsEmpty + 8, kMark = kTicket + 8,
                       kBytes = kMark + 4 * kMarks;
};

// What is rare about a step, told with its dO: NaN or Inf in K, or perhaps in its rows where they
// see the tile in part; a centred row, with a bit in turn.
constexpr u32 kInKeys = 8, kInRows = 4, kCentered = 2;

// A step of a consumer: without a mask, under a mask, with all that may be.
enum class Step { kUsual, kMasked, kAny };

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
  constexpr int kBlockM = S::kBlockM, kBlockN = S::kBlockN, kGroups = kBlockM / 8;
  constexpr bool kBf16 = S::kBf16;
  extern __shared__ __align__(1024) char shared[];
  const u32 base = ptx::shared_address(shared);
  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const Band& band = params.band;

  if (threadIdx.x == 0) {
    constexpr u32 kWarps = kConsumers / 32;
    const i32 ticket = atomicAdd(params.tickets, 1);
    ptx::mbarrier_init(base + S::kKeysFull, 1);
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
      ptx::mbarrier_init(base + S::kRowsFull, kBlockM == 128 ? kConsumers : kConsumers / 2);
      ptx::mbarrier_init(base + S::kRowsEmpty, 32);
    }
    ptx::fence_mbarrier_init();
    ptx::st_shared(base + S::kTicket, ticket);
  }
  if constexpr (kCenter) write_ones<Half>(base + S::kOnes, threadIdx.x);
  __syncthreads();
  // Known to be alike in all lanes, as is what follows from it: descriptors then cost little.
  const i32 ticket = __shfl_sync(kWholeWarp, ptx::ld_shared(base + S::kTicket), 0);
  if (ticket >= params.pieces) {
    Conversion<S, kFloatOut, kCenter>(params, ticket - params.pieces)
        .run(reinterpret_cast<float*>(shared));
    return;
  }
  const Piece<kBlockM, kBlockN> piece(params, ticket);
  auto mark_of = [&](u32 step) -> u32 {
    const i32 mark = lane == 0 ? ptx::ld_shared(base + S::kMark + 4 * (step % S::kMarks)) : 0;
    return __shfl_sync(kWholeWarp, mark, 0);
  };

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<S::kLoaderRegs>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0 && piece.steps > 0) {
      // -- The loader: K and V once, then Q and dO of every step with LSE and delta --------------
      auto load = [&](const ptx::TensorMap& map, u32 to, u32 full, int panels, int panel_bytes,
                      i32 row, i32 head) {
        for (int i = 0; i < panels; ++i)
          ptx::tma_load_4d(to + i * panel_bytes, map, full, i * kPanelCols, row, head, piece.batch);
      };
      Walk walk = Walk::at(piece, params.group, 0);
      ptx::mbarrier_arrive_expect_tx(base + S::kKeysFull, K::kBytes + V::kBytes);
      load(params.k_map, base + S::kK, base + S::kKeysFull, K::kCount, K::kPanelBytes,
           piece.first_key, piece.kv_head);
      load(params.v_map, base + S::kV, base + S::kKeysFull, V::kCount, V::kPanelBytes,
           piece.first_key, piece.kv_head);
      for (i32 step = 0; step < piece.steps; ++step) {
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
        walk.next(piece);
      }
    } else if (warp == 1 || warp == 2) {
      // -- Two warps that add dQ, step after step in turn ----------------------------------------
      const u32 mine = __shfl_sync(kWholeWarp, warp - 1, 0);  // known to be alike in all lanes
      for (i32 step = mine; step < piece.steps; step += 2) {
        const Walk walk = Walk::at(piece, params.group, step);
        const i32 blocks = (band.n_q + kBlockM - 1) / kBlockM;
        const i32 block_at = (piece.batch * params.heads + walk.head) * blocks + walk.block;
        const i32 turn = turn_of<kBlockM, kBlockN>(params, piece.tile, walk.block);
        RowShare<S, kCenter> rows;
        ptx::mbarrier_wait(base + S::kShareFull + 8 * mine, step / 2 % 2);
        if (const u32 mark = kCenter ? mark_of(step) : 0; (mark & kCentered) != 0) {
          ptx::mbarrier_wait(base + S::kRowsFull, mark % 2);
          rows.take(base + S::kRows);
          ptx::mbarrier_arrive(base + S::kRowsEmpty);
        }
        add_share<S::kShareBytes, kBlockM>(params, block_at, turn,
                                           base + S::kShare + mine * S::kShareBytes,
                                           base + S::kShareEmpty + 8 * mine, rows);
      }
    } else if (warp == 3 && piece.steps > 0) {
      // -- One that looks for what is rare --------------------------------------------------------
      ptx::mbarrier_wait(base + S::kKeysFull, 0);
      const bool in_keys =
          params.masked &&
          __any_sync(kWholeWarp, finds_nonfinite<Half, K::kBytes, 32>(shared + S::kK, lane));
      Walk walk = Walk::at(piece, params.group, 0);
      u32 centered_steps = 0;
      for (i32 step = 0; step < piece.steps; ++step) {
        u32 mark = in_keys ? kInKeys : 0;
        if constexpr (kCenter) {
          const auto centered = Centered::of(params, piece.batch, piece.kv_head);
          if (centered.template any<kBlockM>(walk.block * kBlockM))
            mark |= kCentered | centered_steps++ % 2;
        }
        if (params.masked && !piece.plain(walk.block)) {
          const i64 row = static_cast<i64>(piece.batch * params.heads + walk.head) * params.pitch +
                          walk.block * kBlockM;
          if (kSoftcap || may_be_in_rows<kBlockM>(params.lse2 + row, params.delta + row))
            mark |= kInRows;
        }
        ptx::mbarrier_wait(base + S::kDOEmpty + 8 * (step % 2), step / 2 % 2 ^ 1);
        if (lane == 0)
          ptx::st_shared(base + S::kMark + 4 * (step % S::kMarks), static_cast<i32>(mark));
        ptx::mbarrier_arrive(base + S::kDOFull + 8 * (step % 2));
        walk.next(piece);
      }
    }
    return;
  }

  // -- Consumers: 64 keys each ---------------------------------------------------------------
  ptx::setmaxnreg_inc<S::kConsumerRegs>();
  const int mine = warpgroup - 1, thread = threadIdx.x % 128;
  const u32 k_rows = descriptor(base + S::kK + mine * 64 * kPanelPitch, 16),
            v_rows = descriptor(base + S::kV + mine * 64 * kPanelPitch, 16),
            k_columns = descriptor(base + S::kK + (K::kCount == 2 ? mine * K::kPanelBytes : 0), 16);
  const u32 ds_queries = K::kCount == 2 ? 0 : mine * S::kPartM * kPanelPitch;
  const u32 share_at = Part<S::kPartM>::of(mine * Part<S::kPartM>::kBytes, thread);
  auto arrive = [&](u32 barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  auto wait_q = [&](i32 step) {
    ptx::mbarrier_wait(base + S::kQFull + 8 * (step % 2), step / 2 % 2);
  };
  auto issue_scores = [&](Accumulator<kGroups>& s, i32 step) {
    ptx::fence_operands(s);
    ptx::wgmma_fence();
    issue_columns<kBf16, K, Q, S::kD>(s, k_rows,
                                      descriptor(base + S::kQ + step % 2 * Q::kBytes, 16));
    ptx::wgmma_commit_group();
  };
  // dQ of a step: K^T dS^T, 64 columns of the head by kPartM queries.
  auto issue_share = [&](Accumulator<S::kPartM / 8>& dq, i32 step) {
    ptx::fence_operands(dq);
    ptx::wgmma_fence();
    issue_transposed<kBf16, DS, kBlockN>(
        dq, k_columns, descriptor(base + S::kDS + step % 2 * DS::kBytes + ds_queries, 16));
    ptx::wgmma_commit_group();
  };
  // Warpgroups take turns: one computes P and dS while the other's products run.
  auto wait_turn = [&] { ptx::bar_sync(kTurn + mine, kConsumers); };
  auto pass_turn = [&] { ptx::bar_arrive(kTurn + (mine ^ 1), kConsumers); };
  if (mine == 1) ptx::bar_arrive(kTurn, kConsumers);

  float dk[2][S::kD / 8][2], dv[2][S::kDv / 8][2];
  clear(dk);
  clear(dv);
  Specials<S> specials(params, piece, shared, mine, thread);
  i32 step = 0;
  Walk walk = Walk::at(piece, params.group, 0);
  // Sums of rows of dS, where the block has a centred row: of this warpgroup's queries, or, of
  // blocks of up to 64, of all by the first one, which reads 64 rows.
  constexpr bool kBothSum = kBlockM == 128;
  auto sum_rows = [&](u32 mark, i32 of_step) {
    float rows[2][1][2];
    ptx::fence_operands(rows);
    ptx::wgmma_fence();
    issue_row_sums<kBf16, DS, kBlockN>(
        rows,
        descriptor(base + S::kDS + of_step % 2 * DS::kBytes + (kBothSum ? ds_queries : 0), 16),
        base + S::kOnes);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(rows);
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
    store_share(base + S::kShare + i * S::kShareBytes + share_at, dq);
  };
  auto tell = [&](i32 of_step) {
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(base + S::kShareFull + 8 * (of_step % 2));
  };
  // What NaN and Inf in K do to dQ.
  auto add_keys = [&](Accumulator<S::kPartM / 8>& dq, i32 of_step) {
    if (!specials.in_keys) return;
    specials.add_keys(dq, shared + S::kDS + of_step % 2 * DS::kBytes, of_step,
                      K::kCount == 2 ? mine * kPanelCols : 0,
                      K::kCount == 2 ? 0 : mine * S::kPartM);
    __syncwarp();  // all lanes have read dS
  };
  auto is_summed = [&](u32 mark) { return kCenter && mark != 0 && (kBothSum || mine == 0); };

  auto wait_do = [&](i32 step) {
    ptx::mbarrier_wait(base + S::kDOFull + 8 * (step % 2), step / 2 % 2);
  };

  float s_next[2][kGroups][2];
  auto scores_of = [&](i32 step) {
    if constexpr (S::kAhead) {
      wait_q(step);
      issue_scores(s_next, step);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(s_next);
    }
  };
  // Behind the first step, since only dQ, a step later, needs K without NaN and Inf.
  auto clean_keys = [&] {
    specials.in_keys = (mark_of(0) & kInKeys) != 0;
    if (!specials.in_keys) return;
    specials.clear_keys();
    if (step < piece.steps) scores_of(step);
  };
  if (piece.steps > 0) {
    ptx::mbarrier_wait(base + S::kKeysFull, 0);
    scores_of(0);
  }

  u32 before = 0;  // kCentered and its bit, of the step before
  // A long loop is slow, for want of instructions, also where it branches over them: so what a
  // usual step does not need is not in its loop.
  auto advance = [&](Step kind) __attribute__((always_inline)) {
    const bool any = kind == Step::kAny;
    const u32 stage = step % 2, parity = step / 2 % 2;
    const u32 do_tile = base + S::kDO + stage * DO::kBytes;
    const bool plain = kind == Step::kUsual || (any && piece.plain(walk.block));
    float s_here[2][S::kAhead ? 1 : kGroups][2], dp[2][kGroups][2];
    float slope[2][kSoftcap ? kGroups : 1][2];
    auto& s = [&]() -> Accumulator<kGroups>& {
      if constexpr (S::kAhead) {
        return s_next;
      } else {
        return s_here;
      }
    }();
    u32 p_half[kGroups / 2][4], ds_half[kGroups / 2][4];
    if constexpr (!S::kAhead) {
      wait_q(step);
      issue_scores(s, step);
    }
    wait_do(step);
    ptx::fence_operands(dp);
    ptx::wgmma_fence();
    issue_columns<kBf16, V, DO, S::kDv>(dp, v_rows, descriptor(do_tile, 16));
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
    const Place place = Place::of(ptx::thread_index() % 128);
    Seen<kGroups> seen;
    if (!plain)
      look<kGroups>(seen, place,
                    RowsOfKey{band, walk.block * kBlockM, piece.first_key + mine * 64});
    wait_turn();
    if constexpr (!S::kAhead) {
      ptx::wgmma_wait_group<1>();
      ptx::fence_operands(s);
    }
    if (any && specials.in_keys) specials.add_to_scores(s, walk, mine * 64, 0);
    probabilities<kSoftcap>(s, slope, base + S::kLse + (stage * kBlockM + place.column) * 4,
                            params);
    if (!plain) clear_unseen(s, seen);
    pack<Half>(p_half, s);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dp);
    score_gradients<kSoftcap>(dp, s, slope,
                              base + S::kDelta + (stage * kBlockM + place.column) * 4);
    if (!plain) clear_unseen(dp, seen);
    pack<Half>(ds_half, dp);
    const u32 ds_tile = base + S::kDS + stage * DS::kBytes;
    ptx::mbarrier_wait(base + S::kDSEmpty + 8 * stage, parity ^ 1);
    if (special) {  // P takes the place of dS for a while
      store_transposed<DS>(ds_tile, p_half, mine * 64, thread);
      ptx::bar_sync(kWarpgroup + mine, 128);
      specials.add_rows(dv, shared + (ds_tile - base),
                        params.dout + params.dout_strides.at(piece.batch, walk.head),
                        params.dout_strides.row, params.d_v, walk.block, mine * 64, 0);
      ptx::bar_sync(kWarpgroup + mine, 128);
    }
    store_transposed<DS>(ds_tile, ds_half, mine * 64, thread);
    if (special) {
      ptx::bar_sync(kWarpgroup + mine, 128);
      specials.add_rows(dk, shared + (ds_tile - base),
                        params.q + params.q_strides.at(piece.batch, walk.head),
                        params.q_strides.row, params.d, walk.block, mine * 64, 0);
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
    if (S::kAhead && step + 1 < piece.steps) wait_q(step + 1);
    if (step > 0) ptx::mbarrier_wait(base + S::kDSFull + 8 * (stage ^ 1), (step - 1) / 2 % 2);

    // dK, and dQ of the step before, for which the other warpgroup has meanwhile written its dS,
    // too. Of no step before the first, and of S none behind the last, they are products of
    // whatever is there, and not used.
    float dq[2][S::kPartM / 8][2];
    auto issue_dk = [&] {
      ptx::fence_operands(dk);
      ptx::fence_operands(ds_half);
      ptx::wgmma_fence();
      issue_rows<kBf16>(dk, ds_half, descriptor(base + S::kQ + stage * Q::kBytes, Q::kPanelBytes));
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
      issue_scores(s_next, step + 1);
    } else {
      issue_share(dq, step + 1);
      issue_dk();
    }
    const bool to_sum = any && step > 0 && is_summed(before);
    const u32 here = kCenter ? mark_of(step) & (kCentered | 1) : 0;
    ptx::wgmma_wait_group<1>();
    ptx::fence_operands(dq);
    if constexpr (S::kAhead) {
      end_dk();
    } else {
      end_dv();
    }
    if (step > 0) {
      if (any) add_keys(dq, step - 1);
      hand_out(dq, step - 1, to_sum);
      if (!to_sum) tell(step - 1);
    }
    ptx::wgmma_wait_group<0>();
    if constexpr (S::kAhead) {
      ptx::fence_operands(s_next);
    } else {
      end_dk();
    }
    if (to_sum) {  // when no other product runs
      sum_rows(before, step - 1);
      tell(step - 1);
    }
    before = here;
    ++step;
    walk.next(piece);
  };
  auto usual = [&] { return !specials.in_keys && before == 0 && piece.plain(walk.block); };
  i32 end = min(piece.steps, 1);
  while (step < end) {
#pragma unroll 1
    for (; step < end && !usual();) {
      wait_do(step);
      if (piece.plain(walk.block) || before != 0 || (mark_of(step) & (kInKeys | kInRows)) != 0) {
        advance(Step::kAny);
      } else {
        advance(Step::kMasked);
      }
    }
#pragma unroll 1
    for (; step < end && usual();) advance(Step::kUsual);
    if (step == 1) {
      clean_keys();
      end = piece.steps;
    }
  }
  if (piece.steps > 0) {
    const i32 last = piece.steps - 1;
    float dq[2][S::kPartM / 8][2];
    ptx::mbarrier_wait(base + S::kDSFull + 8 * (last % 2), last / 2 % 2);
    issue_share(dq, last);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(dq);
    add_keys(dq, last);
    hand_out(dq, last, is_summed(before));
    if (is_summed(before)) sum_rows(before, last);
    tell(last);
  }

  // -- dK and dV: in halves through the places of K and V ------------------------------------
  const i32 first_key = piece.first_key + mine * 64;
  if constexpr (kFloatOut) {
    write_rows(static_cast<float*>(params.dk) +
                   params.dk_strides.at(piece.batch, piece.kv_head, first_key),
               params.dk_strides.row, band.n_k - first_key, params.d, dk, params.scale, thread);
    write_rows(static_cast<float*>(params.dv) +
                   params.dv_strides.at(piece.batch, piece.kv_head, first_key),
               params.dv_strides.row, band.n_k - first_key, params.d_v, dv, 1.0f, thread);
  } else {
    ptx::bar_sync(kBoth, kConsumers);  // both have read K and V
    stage_rows<Half, K, S::kD / 8>(base + S::kK, mine * 64, dk, params.scale, thread);
    stage_rows<Half, V, S::kDv / 8>(base + S::kV, mine * 64, dv, 1.0f, thread);
    ptx::fence_proxy_async();
    ptx::bar_sync(kWarpgroup + mine, 128);
    if (thread == 0 && first_key < band.n_k) {
      for (int i = 0; i < K::kCount; ++i)
        ptx::tma_store_4d(base + S::kK + i * K::kPanelBytes + mine * 64 * kPanelPitch,
                          params.dk_map, i * kPanelCols, first_key, piece.kv_head, piece.batch);
      for (int i = 0; i < V::kCount; ++i)
        ptx::tma_store_4d(base + S::kV + i * V::kPanelBytes + mine * 64 * kPanelPitch,
                          params.dv_map, i * kPanelCols, first_key, piece.kv_head, piece.batch);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
    }
  }
}

}  // namespace cuflash::sm90

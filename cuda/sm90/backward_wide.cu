// dQ, dK and dV on Hopper in one pass, head dimensions above 128. A CTA takes 64 keys of one key
// head and walks all rows that see them, of all query heads of the group, in ascending order, 64 a
// step. Of two consumer warpgroups each makes P and dS of half of the rows and shares them through
// shared memory; the first accumulates dV, the second dK, and each adds its columns of dQ from
// registers. See sm90/sums.cuh for the order of dQ and why every wait for other CTAs ends.
#include "sm90/specials.cuh"
#include "sm90/sums.cuh"

namespace cuflash::sm90 {

template <class Half_, int kD_, int kDv_>
struct WideShape {
  using Half = Half_;
  static constexpr int kD = kD_, kDv = kDv_, kBlockM = 64, kBlockN = 64;
  static constexpr int kColumns = kD > kDv ? kD : kDv;  // of an accumulator; the rest is not used
  static constexpr bool kBf16 = Half::kOnes == 0x3f803f80u;
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
                       kP = kDO + 2 * DO::kBytes, kDS = kP + 2 * DS::kBytes,
                       kLse = kDS + 2 * DS::kBytes, kDelta = kLse + 8 * kBlockM,
                       kBarriers = kDelta + 8 * kBlockM;
  static constexpr u32 kKeysFull = kBarriers, kQFull = kKeysFull + 8, kQEmpty = kQFull + 16,
                       kDOFull = kQEmpty + 16, kDOEmpty = kDOFull + 16, kDSFull = kDOEmpty + 16,
                       kDSEmpty = kDSFull + 16, kTurnCome = kDSEmpty + 16, kAdded = kTurnCome + 16,
                       kTold = kAdded + 16, kFoundAt = kTold + 16, kSmallAt = kFoundAt + 8,
                       kTicket = kSmallAt + 8, kBytes = kTicket + 8;
};

template <class S, bool kSoftcap, bool kFloatOut>
__global__ void __launch_bounds__(kThreads, 1)
    backward_wide(const __grid_constant__ BackwardParams params) {
  using Half = typename S::Half;
  using Q = typename S::Q;
  using DO = typename S::DO;
  using K = typename S::K;
  using V = typename S::V;
  using DS = typename S::DS;
  constexpr int kBlockM = S::kBlockM, kBlockN = S::kBlockN;
  constexpr int kGroups = kBlockM / 2 / 8;  // a warpgroup's P: 64 keys x 32 queries
  constexpr bool kBf16 = S::kBf16, kMost = true;
  extern __shared__ __align__(1024) char shared[];
  const u32 base = ptx::shared_address(shared);
  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const Band& band = params.band;

  if (threadIdx.x == 0) {
    constexpr u32 kWarps = kConsumers / 32;
    ptx::mbarrier_init(base + S::kKeysFull, 1);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(base + S::kQFull + 8 * i, 1);
      ptx::mbarrier_init(base + S::kQEmpty + 8 * i, kWarps);
      ptx::mbarrier_init(base + S::kDOFull + 8 * i, 1);
      ptx::mbarrier_init(base + S::kDOEmpty + 8 * i, kWarps);
      ptx::mbarrier_init(base + S::kDSFull + 8 * i, kWarps);
      ptx::mbarrier_init(base + S::kDSEmpty + 8 * i, kWarps);
      ptx::mbarrier_init(base + S::kTurnCome + 8 * i, 1);
      ptx::mbarrier_init(base + S::kAdded + 8 * i, kWarps);
      ptx::mbarrier_init(base + S::kTold + 8 * i, 1);
      ptx::st_shared(base + S::kSmallAt + 4 * i, -1);
    }
    ptx::fence_mbarrier_init();
    ptx::st_shared(base + S::kTicket, atomicAdd(params.tickets, 1));
  }
  __syncthreads();
  const Piece<kBlockM, kBlockN> piece(params, ptx::ld_shared(base + S::kTicket));
  const i32 all_blocks = (band.n_q + kBlockM - 1) / kBlockM;
  auto block_at = [&](const Walk& walk) {
    return (piece.batch * params.heads + walk.head) * all_blocks + walk.block;
  };

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kLoaderRegs<kMost>>();
    const int warp = threadIdx.x / 32;
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
        ptx::mbarrier_arrive(base + S::kTurnCome + 8 * (step % 2));
      }
    } else if (warp == 2) {
      // -- Says what has been added --------------------------------------------------------------
      for (i32 step = 0; step < piece.steps; ++step) {
        ptx::mbarrier_wait(base + S::kAdded + 8 * (step % 2), step / 2 % 2);
        const i32 found = ptx::ld_shared(base + S::kFoundAt + 4 * (step % 2));
        const i32 mark = ptx::ld_shared(base + S::kSmallAt + 4 * (step % 2)) == step ? kSmall : 0;
        ptx::st_release_gpu(params.turns + block_at(Walk::at(piece, params.group, step)),
                            found + 1 | mark);
        ptx::mbarrier_arrive(base + S::kTold + 8 * (step % 2));
      }
    }
    return;
  }

  // -- Consumers
  // ------------------------------------------------------------------------------------
  ptx::setmaxnreg_inc<kConsumerRegs<kMost>>();
  const int mine = warpgroup - 1, thread = threadIdx.x % 128;
  const Place place = Place::of(thread);
  float acc[2][S::kColumns / 8][2];  // dV or dK
  clear(acc);
  Specials<S> specials(params, piece, shared, mine, thread);
  auto arrive = [&](u32 barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  const int first_query = mine * 32;
  bool special = false;

  // S and dP of a step, issued.
  auto issue_products = [&](Accumulator<kGroups>& s, Accumulator<kGroups>& dp, i32 step) {
    const u32 q = base + S::kQ + step % 2 * Q::kBytes + first_query * kPanelPitch,
              dout = base + S::kDO + step % 2 * DO::kBytes + first_query * kPanelPitch;
    ptx::fence_operands(s);
    ptx::fence_operands(dp);
    ptx::wgmma_fence();
    issue_columns<kBf16, K, Q, S::kD>(s, descriptor(base + S::kK, 16), descriptor(q, 16));
    issue_columns<kBf16, V, DO, S::kDv>(dp, descriptor(base + S::kV, 16), descriptor(dout, 16));
    ptx::wgmma_commit_group();
  };
  auto wait_rows = [&](i32 step) {
    ptx::mbarrier_wait(base + S::kQFull + 8 * (step % 2), step / 2 % 2);
    ptx::mbarrier_wait(base + S::kDOFull + 8 * (step % 2), step / 2 % 2);
  };
  // P and dS out of them, to shared memory.
  auto make = [&](Accumulator<kGroups>& s, Accumulator<kGroups>& dp, i32 step, const Walk& walk) {
    const u32 stage = step % 2;
    const bool plain = piece.plain(walk.block);
    special = false;
    if (!plain && params.masked) {
      special = specials.in_rows(stage);
      if (special) specials.clear_rows(stage);
    }
    if (specials.in_keys) specials.add_to_scores(s, walk, 0, first_query);
    float slope[2][kSoftcap ? kGroups : 1][2];
    const u32 rows = (stage * kBlockM + first_query + place.column) * 4;
    const RowsOfKey seen{band, walk.block * kBlockM + first_query, piece.first_key};
    u32 p_half[kGroups / 2][4], ds_half[kGroups / 2][4];
    probabilities<kSoftcap>(s, slope, base + S::kLse + rows, params);
    if (!plain) clear_unseen(s, place, seen);
    pack<Half>(p_half, s);
    score_gradients<kSoftcap>(dp, s, slope, base + S::kDelta + rows);
    if (!plain) clear_unseen(dp, place, seen);
    pack<Half>(ds_half, dp);
    ptx::mbarrier_wait(base + S::kDSEmpty + 8 * stage, step / 2 % 2 ^ 1);
    const u32 at = stage * DS::kBytes + first_query * kPanelPitch;
    store_transposed<DS>(base + S::kP + at, p_half, 0, thread);
    store_transposed<DS>(base + S::kDS + at, ds_half, 0, thread);
    ptx::fence_proxy_async();
    __syncwarp();
    arrive(base + S::kDSFull + 8 * stage);
  };

  Walk walk = Walk::at(piece, params.group, 0);
  if (piece.steps > 0) {
    ptx::mbarrier_wait(base + S::kKeysFull, 0);
    if (params.masked) specials.look_at_keys();
    float s[2][kGroups][2], dp[2][kGroups][2];
    wait_rows(0);
    issue_products(s, dp, 0);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(s);
    ptx::fence_operands(dp);
    make(s, dp, 0, walk);
  }

#pragma unroll 1
  for (i32 step = 0; step < piece.steps; ++step) {
    const u32 stage = step % 2, parity = step / 2 % 2;
    const bool more = step + 1 < piece.steps;
    const Walk now = walk;
    walk.next(piece);
    const u32 p_tile = S::kP + stage * DS::kBytes, ds_tile = S::kDS + stage * DS::kBytes;
    ptx::mbarrier_wait(base + S::kDSFull + 8 * stage, parity);
    if (special) {
      if (mine == 0) {
        specials.add_rows(acc, shared + p_tile,
                          params.dout + params.dout_strides.at(piece.batch, now.head),
                          params.dout_strides.row, params.d_v, now.block, 0, 0);
      } else {
        specials.add_rows(acc, shared + ds_tile,
                          params.q + params.q_strides.at(piece.batch, now.head),
                          params.q_strides.row, params.d, now.block, 0, 0);
      }
    }
    if (more) wait_rows(step + 1);
    float s[2][kGroups][2], dp[2][kGroups][2], dq[2][S::kPartM / 8][2];
    issue_products(s, dp, step + 1);  // after the last step not used
    ptx::fence_operands(acc);
    ptx::wgmma_fence();
    issue_both_rows<kBf16>(acc, descriptor(base + (mine == 0 ? p_tile : ds_tile), 16),
                           mine == 0
                               ? descriptor(base + S::kDO + stage * DO::kBytes, DO::kPanelBytes)
                               : descriptor(base + S::kQ + stage * Q::kBytes, Q::kPanelBytes));
    ptx::wgmma_commit_group();
    // dQ: 64 columns of the head by all queries, or half of them if there are no more columns.
    auto issue_share = [&](Accumulator<S::kPartM / 8>& share, int i) {
      const int part = mine * S::kTake + i;
      const u32 k = base + S::kK + (K::kCount == 1 ? 0 : part * K::kPanelBytes),
                ds = base + ds_tile + (K::kCount == 1 ? part * S::kPartM * kPanelPitch : 0);
      ptx::fence_operands(share);
      ptx::wgmma_fence();
      issue_transposed<kBf16, DS, kBlockN>(share, descriptor(k, 16), descriptor(ds, 16));
      ptx::wgmma_commit_group();
    };
    float* const sums = params.sums +
                        static_cast<i64>(block_at(now)) * (S::kParts * S::kPartM * 64) +
                        (mine * S::kTake * S::kPartM * 64 + thread * 4);
    auto add = [&](Accumulator<S::kPartM / 8>& share, int i, bool first, bool exactly) {
      const int part = mine * S::kTake + i;
      if (part >= S::kParts) return;
      if (specials.in_keys)
        specials.add_keys(share, shared + ds_tile, step, K::kCount == 1 ? 0 : part * kPanelCols,
                          K::kCount == 1 ? part * S::kPartM : 0);
      const bool small = holds_small(share);
      if (small) ptx::st_shared(base + S::kSmallAt + 4 * stage, step);
      add_registers(sums + i * (S::kPartM * 64), share, first, exactly || small);
    };
    // A softcap leaves no registers for dQ beside S and dP.
    if constexpr (!kSoftcap) issue_share(dq, 0);
    ptx::wgmma_wait_group<kSoftcap ? 1 : 2>();
    ptx::fence_operands(s);
    ptx::fence_operands(dp);
    if (more) make(s, dp, step + 1, walk);
    if constexpr (kSoftcap) issue_share(dq, 0);
    ptx::wgmma_wait_group<0>();
    ptx::fence_operands(acc);
    ptx::fence_operands(dq);
    arrive(base + S::kQEmpty + 8 * stage);
    arrive(base + S::kDOEmpty + 8 * stage);
    ptx::mbarrier_wait(base + S::kTurnCome + 8 * stage, parity);
    const i32 found = ptx::ld_shared(base + S::kFoundAt + 4 * stage);
    if constexpr (S::kTake == 2) {
      float other[2][S::kPartM / 8][2];
      issue_share(other, 1);
      add(dq, 0, found == 0, (found & kSmall) != 0);
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(other);
      arrive(base + S::kDSEmpty + 8 * stage);
      add(other, 1, found == 0, (found & kSmall) != 0);
    } else {
      add(dq, 0, found == 0, (found & kSmall) != 0);
      arrive(base + S::kDSEmpty + 8 * stage);
    }
    __syncwarp();
    arrive(base + S::kAdded + 8 * stage);
  }

  // -- dV or dK: in halves through the place of V or K
  // ---------------------------------------------
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

// Forward attention on Hopper: TMA, wgmma, warp specialisation. A CTA takes 64 rows of one head for
// each of its consumer warpgroups; a producer warp streams the tiles of keys from right to left,
// for both CTAs of a cluster at once. The arithmetic is that of emulation/flash.py.
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/special.cuh"
#include "ptx/tma.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/products.cuh"

namespace cuflash::sm90 {

// Named barriers; 0 is __syncthreads.
constexpr u32 kTurn = 1, kStored = 5;  // + warpgroup

// A step of a consumer: on the first tile of a block of rows, alone or joined with the last product
// of the block before; on a tile at an edge of the band; on one that every row sees whole.
enum class Step { kAlone, kJoined, kEdge, kPlain };

template <class S, class P, class A, bool kSoftcap, bool kFloatOut>
__global__ void __cluster_dims__(P::kCluster, 1, 1) __launch_bounds__(P::kThreads, 1)
    forward(const __grid_constant__ ForwardParams params) {
  using Half = typename S::Half;
  using L = Layout<S, P>;
  constexpr int kBlockN = S::kBlockN, kGroups = S::kGroups, kStages = P::kStages,
                kWarpgroups = P::kWarpgroups, kCluster = P::kCluster;
  extern __shared__ __align__(1024) char shared[];
  const u32 base = ptx::shared_address(shared);
  const int warpgroup = __shfl_sync(kWholeWarp, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const i32 rank = kCluster == 1 ? 0 : static_cast<i32>(ptx::cluster_ctarank());
  const i32 cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  const Band& band = params.band;
  const Order& order = params.order;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(params.k_map);
    ptx::prefetch_tensormap(params.q_map);
    ptx::prefetch_tensormap(params.v_map);
    if constexpr (S::kStaged && !kFloatOut) ptx::prefetch_tensormap(params.out_map);
    constexpr u32 kWarps = 4 * kWarpgroups * kCluster;
    const u32 scanners = params.masked ? P::kScanWarps * kCluster : 0;
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(base + L::kKFull + 8 * i, 1);
      ptx::mbarrier_init(base + L::kVFull + 8 * i, 1);
      ptx::mbarrier_init(base + L::kKEmpty + 8 * i, kWarps);
      ptx::mbarrier_init(base + L::kVEmpty + 8 * i, kWarps + scanners);
      ptx::mbarrier_init(base + L::kVClean + 8 * i, P::kScanWarps);
      ptx::st_shared(base + L::kFound + 4 * i, -1);
    }
    for (int i = 0; i < P::kQStages * kWarpgroups; ++i) {
      ptx::mbarrier_init(base + L::kQFull + 8 * i, 1);
      ptx::mbarrier_init(base + L::kQEmpty + 8 * i, 4);
    }
    const u32 readers = kWarps + kCluster - 1 + scanners;
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(base + L::kWorkFull + 8 * i, 1);
      ptx::mbarrier_init(base + L::kWorkEmpty + 8 * i, readers);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (P::kOnes != Ones::kNone) {
    for (int i = threadIdx.x; i < 16 * kPanelPitch / 4; i += P::kThreads)
      ptx::st_shared(base + L::kOnes + 4 * i, Half::kOnes);
    ptx::fence_proxy_async();
  }
  __syncthreads();
  if constexpr (kCluster > 1) {
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
  }

  // The turn-th piece of work, -1 after the last: from the mailbox that CTA 0's producer fills.
  auto receive = [&](u32 turn) -> i32 {
    const u32 slot = turn % 2, parity = turn / 2 % 2;
    if constexpr (kCluster > 1) {
      ptx::mbarrier_wait_acquire_cluster(base + L::kWorkFull + 8 * slot, parity);
    } else {
      ptx::mbarrier_wait(base + L::kWorkFull + 8 * slot, parity);
    }
    return ptx::ld_shared(base + L::kWork + 4 * slot);
  };
  auto received = [&](u32 turn) {
    const u32 barrier = base + L::kWorkEmpty + 8 * (turn % 2);
    if constexpr (kCluster > 1) {
      ptx::mbarrier_arrive_cluster(ptx::mapa(barrier, 0));
    } else {
      ptx::mbarrier_arrive(barrier);
    }
  };

  // One lane a warp tells every CTA whose loads reach this shared memory.
  auto release = [&](u32 barrier) {
    if constexpr (kCluster > 1) {
      if (lane < kCluster) ptx::mbarrier_arrive_cluster(ptx::mapa(barrier, lane));
    } else {
      if (lane == 0) ptx::mbarrier_arrive(barrier);
    }
  };

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<P::kProducerRegs>();
    if (threadIdx.x == 0) {
      // -- The producer: K one tile ahead of V ----------------------------------------------------
      auto load_tile = [&](const ptx::TensorMap& map, u32 to, u32 full, u32 bytes, int panels,
                           i32 tile, i32 head, i32 batch) {
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        constexpr int kRows = kBlockN / kCluster;  // each CTA brings its share to both
        const int first = rank * kRows;
        for (int panel = 0; panel < panels; ++panel) {
          const u32 at = to + (panel * kBlockN + first) * kPanelPitch;
          if constexpr (kCluster > 1) {
            ptx::tma_load_4d_multicast(at, map, full, panel * kPanelCols, tile * kBlockN + first,
                                       head, batch, (1 << kCluster) - 1);
          } else {
            ptx::tma_load_4d(at, map, full, panel * kPanelCols, tile * kBlockN, head, batch);
          }
        }
      };
      u32 k_turn = 0, v_turn = 0;
      i32 work = cluster;
      for (u32 turn = 0;; ++turn) {
        i32 next = 0;
        if (rank == 0) {
          // Every cluster asks once more than it gets work, so the counter ends at 0.
          next = clusters + static_cast<i32>(atomicInc(params.counter, order.works + clusters - 1));
          ptx::mbarrier_wait_asleep(base + L::kWorkEmpty + 8 * (turn % 2), turn / 2 % 2 ^ 1);
          const i32 told = work < order.works ? work : -1;
          const u32 slot = base + L::kWork + 4 * (turn % 2);
          const u32 full = base + L::kWorkFull + 8 * (turn % 2);
          ptx::st_shared(slot, told);
          ptx::mbarrier_arrive(full);
          if constexpr (kCluster > 1) {
            ptx::st_shared_cluster(ptx::mapa(slot, 1), told);
            ptx::mbarrier_arrive_release_cluster(ptx::mapa(full, 1));
          }
        } else {
          const i32 told = receive(turn);
          received(turn);
          work = told < 0 ? order.works : told;
        }
        if (work >= order.works) break;
        const Work<S, P> w(order, band, work, rank);
        const i32 batch = order.by_batch.of(w.flat_head),
                  head = w.flat_head - batch * order.in_batch, kv_head = order.by_group.of(head);
        auto load_k = [&](i32 tile) {
          const u32 stage = k_turn % kStages;
          ptx::mbarrier_wait_asleep(base + L::kKEmpty + 8 * stage, k_turn / kStages % 2 ^ 1);
          load_tile(params.k_map, base + L::kK + stage * S::K::kBytes, base + L::kKFull + 8 * stage,
                    S::K::kBytes, S::K::kCount, tile, kv_head, batch);
          ++k_turn;
        };
        auto load_v = [&](i32 tile) {
          const u32 stage = v_turn % kStages;
          ptx::mbarrier_wait_asleep(base + L::kVEmpty + 8 * stage, v_turn / kStages % 2 ^ 1);
          load_tile(params.v_map, base + L::kV + stage * S::V::kBytes, base + L::kVFull + 8 * stage,
                    S::V::kBytes, S::V::kCount, tile, kv_head, batch);
          ++v_turn;
        };
        if (w.end > w.begin) load_k(w.end - 1);
        const u32 q_parity = turn / P::kQStages % 2 ^ 1;
        for (int i = 0; i < kWarpgroups; ++i) {
          const u32 slot = turn % P::kQStages * kWarpgroups + i, full = base + L::kQFull + 8 * slot;
          ptx::mbarrier_wait_asleep(base + L::kQEmpty + 8 * slot, q_parity);
          ptx::mbarrier_arrive_expect_tx(full, S::Q::kBytes);
          for (int panel = 0; panel < S::Q::kCount; ++panel) {
            ptx::tma_load_4d(base + L::kQ + slot * L::kQSlot + panel * S::Q::kPanelBytes,
                             params.q_map, full, panel * kPanelCols, w.first_row + 64 * i, head,
                             batch);
          }
        }
        for (i32 tile = w.end - 1; tile >= w.begin; --tile) {
          if (tile > w.begin) load_k(tile - 1);
          load_v(tile);
        }
        work = next;
      }
    } else if (threadIdx.x >= 32 && params.masked) {
      // -- Three warps that look for NaN and Inf in tiles of V that some row does not see whole ---
      u32 v_turn = 0;
      for (u32 turn = 0;; ++turn) {
        const i32 work = receive(turn);
        __syncwarp();
        if (lane == 0) received(turn);
        if (work < 0) break;
        const Work<S, P> w(order, band, work, rank);
        i32 begin, end;
        Work<S, P>::tiles(band, w.first, w.last_row, begin, end);
        for (i32 tile = w.end - 1; tile >= w.begin; --tile, ++v_turn) {
          const u32 stage = v_turn % kStages;
          ptx::mbarrier_wait_asleep(base + L::kVFull + 8 * stage, v_turn / kStages % 2);
          if (tile < end && tile >= begin && w.scanned(tile)) {
            char* v = shared + L::kV + stage * S::V::kBytes;
            const bool some =
                clear_nonfinite<Half, S::V::kBytes, 32 * P::kScanWarps>(v, threadIdx.x - 32);
            if (__any_sync(kWholeWarp, some) && lane == 0) {
              // Passed before the tile was loaded: nobody reads the mark of the one before it.
              ptx::mbarrier_wait(base + L::kVEmpty + 8 * stage, v_turn / kStages % 2 ^ 1);
              ptx::st_shared(base + L::kFound + 4 * stage, static_cast<i32>(v_turn));
            }
            ptx::fence_proxy_async();
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(base + L::kVClean + 8 * stage);
          }
          __syncwarp();
          release(base + L::kVEmpty + 8 * stage);
        }
      }
    }
  } else {
    // -- Consumers: 64 rows each ------------------------------------------------------------------
    ptx::setmaxnreg_inc<P::kConsumerRegs>();
    const int mine = warpgroup - 1;
    constexpr int kColumns = S::kDv / 8 + (P::kOnes != Ones::kNone ? 1 : 0);
    float s[2][kGroups][2], o[2][kColumns][2];
    u32 p[kGroups / 2][4];
    u32 k = 0, v = 0;      // tiles used so far
    u32 clean_parity = 0;  // a bit per stage

    // Warpgroups take turns at the tensor cores: one computes exponentials while the other's
    // products run.
    auto wait_turn = [&] {
      if constexpr (P::kPingPong) ptx::bar_sync(kTurn + mine, 256);
    };
    auto pass_turn = [&] {
      if constexpr (P::kPingPong)
        ptx::bar_arrive(mine == kWarpgroups - 1 ? kTurn : kTurn + mine + 1, 256);
    };
    if (P::kPingPong && mine == kWarpgroups - 1) ptx::bar_arrive(kTurn, 256);

    auto wait_k = [&] {
      ptx::mbarrier_wait(base + L::kKFull + 8 * (k % kStages), k / kStages % 2);
    };
    auto release_k = [&] { release(base + L::kKEmpty + 8 * (k++ % kStages)); };
    auto wait_v = [&] {
      ptx::mbarrier_wait(base + L::kVFull + 8 * (v % kStages), v / kStages % 2);
    };
    auto release_v = [&] { release(base + L::kVEmpty + 8 * (v++ % kStages)); };
    // V of a tile that is looked through first; true if it held NaN or Inf.
    auto wait_clean = [&] {
      const u32 stage = v % kStages;
      ptx::mbarrier_wait(base + L::kVClean + 8 * stage, clean_parity >> stage & 1);
      clean_parity ^= 1u << stage;
      const i32 mark = lane == 0 ? ptx::ld_shared(base + L::kFound + 4 * stage) : -1;
      return __any_sync(kWholeWarp, mark == static_cast<i32>(v)) != 0;
    };
    auto product = [&] {  // O takes P
      issue_output<S, P::kOnes>(o, p, base + L::kV + v % kStages * S::V::kBytes, base + L::kOnes);
      ptx::wgmma_commit_group();
    };
    auto end_product = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::fence_operands(o);
      ptx::fence_operands(p);
      release_v();
    };
    auto lone_product = [&] {
      ptx::fence_operands(o);
      ptx::fence_operands(p);
      ptx::wgmma_fence();
      product();
      end_product();
    };

    RowState state[2];
    bool found = false;    // NaN or Inf that some row may see
    bool pending = false;  // the block of rows lacks one product yet
    i32 piece = -1;
    for (u32 turn = 0;; ++turn) {
      const i32 before = piece;  // whose O is in the registers
      piece = receive(turn);
      __syncwarp();
      if (lane == 0) received(turn);
      const Work<S, P> w(order, band, max(piece, 0), rank);
      const i32 first_row = w.first_row + 64 * mine,
                last_row = first_row < 0 ? first_row - 1 : min(first_row + 64, band.n_q) - 1;
      i32 begin, end, cta_begin, cta_end;  // tiles that this warpgroup sees, that the CTA sees
      Work<S, P>::tiles(band, first_row, last_row, begin, end);
      Work<S, P>::tiles(band, w.first, w.last_row, cta_begin, cta_end);
      if (piece < 0 || end <= begin) begin = end = w.begin;
      const i32 full_begin = (band.low(last_row) + kBlockN - 1) / kBlockN,
                full_end = band.high(first_row) / kBlockN;
      const u32 slot = turn % P::kQStages * kWarpgroups + mine;
      const u32 q = ptx::opaque(base + L::kQ + slot * L::kQSlot);
      auto wait_q = [&] {
        ptx::mbarrier_wait(base + L::kQFull + 8 * slot, turn / P::kQStages % 2);
      };
      auto release_q = [&] {
        if (lane == 0) ptx::mbarrier_arrive(base + L::kQEmpty + 8 * slot);
      };

      // Tiles that are here for others. Every warpgroup of a CTA takes as many turns: one for each
      // of its tiles.
      auto skip_k = [&](i32 tile) {
        if (tile < cta_end && tile >= cta_begin) {
          wait_turn();
          pass_turn();
        }
        wait_k();
        __syncwarp();
        release_k();
      };
      auto skip_v = [&](i32 tile) {
        if (tile < cta_end && tile >= cta_begin && w.scanned(tile))
          clean_parity ^= 1u << v % kStages;
        wait_v();
        __syncwarp();
        release_v();
      };
      auto skip = [&](i32 from, i32 to) {
        for (i32 tile = from - 1; tile >= to; --tile) {
          skip_k(tile);
          skip_v(tile);
        }
      };
      // S of a tile, capped, -inf where not seen.
      auto mask = [&](i32 tile) {
        if (tile >= full_begin && tile < full_end) return;
        hide(s, band, first_row, tile * kBlockN, ptx::thread_index() % 128);
      };
      auto cap = [&] {
        if constexpr (kSoftcap) {
#pragma unroll
          for (int i = 0; i < 4 * kGroups; ++i)
            (&s[0][0][0])[i] = capped((&s[0][0][0])[i], params.cap);
        }
      };
      float alpha[2];
      auto to_p = [&] {
        if constexpr (A::kReference == Reference::kStale) {
          update_stale<Half>(state, p, s, alpha, params.c, params.stale_limit);
        } else {
          update<A>(state, s, alpha, params.c);
        }
      };

      // Of the block before: the rows' sums of P (of a rounded P O holds them), and LSE.
      float l[2];
      bool sees[2];
      auto finish_rows = [&] {
        const Work<S, P> done(order, band, ptx::opaque(before), rank);
        const int thread = ptx::thread_index() % 128;
        const i32 row = done.first_row + 64 * mine + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          l[i] = quad_sum(state[i].l);
          sees[i] = band.high(row + 8 * i) > band.low(row + 8 * i);
          if (thread % 4 == 0 && exists(band, row + 8 * i)) {
            const float lse = __fmul_rn(__fadd_rn(state[i].r, ptx::lg2_approx_ftz(l[i])),
                                        0.693147182464599609375f);
            params.lse[static_cast<i64>(done.flat_head) * band.n_q + row + 8 * i] =
                sees[i] ? lse : negative_infinity();
          }
        }
      };

      // Whether the tiles that the next step waits for are there: asked while this one's scores
      // are looked through, so that the answer costs no time.
      bool ready = false;
      auto ask = [&] {
        const u32 next_k = k + 1, next_v = v + 1;
        return ptx::mbarrier_test_wait_parity(base + L::kKFull + 8 * (next_k % kStages),
                                              next_k / kStages % 2) &
               ptx::mbarrier_test_wait_parity(base + L::kVFull + 8 * (next_v % kStages),
                                              next_v / kStages % 2);
      };

      // S and P of a tile, while O takes the P before.
      auto step = [&](i32 tile, Step kind) {
        const bool first = kind == Step::kAlone || kind == Step::kJoined;
        const bool asked = P::kEarly && !first && ready;
        if (!asked) wait_k();
        if (!first) {
          if (!asked) wait_v();
          if (kind != Step::kPlain && w.scanned(tile + 1)) found |= wait_clean();
        }
        wait_turn();
        ptx::fence_operands(s);
        ptx::fence_operands(o);
        ptx::fence_operands(p);
        ptx::wgmma_fence();
        issue_scores<S>(s, q, base + L::kK + k % kStages * S::K::kBytes);
        ptx::wgmma_commit_group();
        if (kind != Step::kAlone) product();
        pass_turn();
        if (kind == Step::kJoined) finish_rows();
        if (kind != Step::kAlone) {
          ptx::wgmma_wait_group<1>();
        } else {
          ptx::wgmma_wait_group<0>();
        }
        ptx::fence_operands(s);
        if (P::kEarly && kind == Step::kPlain) ready = ask();
        release_k();
        if (tile == begin) release_q();
        cap();
        if (kind != Step::kPlain) mask(tile);
        if (first) state[0] = state[1] = RowState();
        if constexpr (A::kReference != Reference::kStale) to_p();
        if (kind != Step::kAlone) end_product();
        if constexpr (A::kReference == Reference::kStale) {
          to_p();
        } else {
          pack<Half>(p, s);
        }
        if (!first && __any_sync(kWholeWarp, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
          for (int i = 0; i < 4 * kColumns; ++i) {
            float& x = (&o[0][0][0])[i];
            x = __fmul_rn(x, alpha[i / (2 * kColumns)]);
          }
        }
      };

      // The last product of the block before runs beside this one's first, unless more lies between
      // them than there are places for.
      const bool joined = P::kJoined && pending && end > begin && w.end - end < kStages;
      if (joined) {
        for (i32 tile = w.end - 1; tile >= end; --tile) skip_k(tile);
        wait_q();
        step(end - 1, Step::kJoined);
      } else if (turn > 0) {
        if (pending) lone_product();
        finish_rows();
      }

      // -- O of the block before. Nothing of it is kept through the loops ------------------------
      if (turn > 0) {
        const Work<S, P> done(order, band, ptx::opaque(before), rank);
        const i32 batch = order.by_batch.of(done.flat_head),
                  head = done.flat_head - batch * order.in_batch;
        const Rows rows = {batch, head, done.first_row + 64 * mine};
        float inverse[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          inverse[i] = sees[i] ? __frcp_rn(A::kRoundedSum ? o[i][kColumns - 1][0] : l[i]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * kColumns; ++i) {  // O of rows that see nothing is 0
          float& x = (&o[0][0][0])[i];
          x = __fmul_rn(x, inverse[i / (2 * kColumns)]);
        }
        write_output<S, kFloatOut>(params, rows, base + L::kO + 4 * mine * L::kOSlot, o);
        if (found) {
          add_specials<Half, kFloatOut>(params, rows, kStored + mine, done.clean_begin * kBlockN,
                                        done.clean_end * kBlockN);
          found = false;
        }
      }
      if (piece < 0) break;

#pragma unroll
      for (int i = 0; i < 4 * kColumns; ++i) (&o[0][0][0])[i] = 0.0f;
      if (joined) {
        for (i32 tile = w.end - 1; tile >= end; --tile) skip_v(tile);
      } else {
        skip(w.end, end);
        wait_q();
        if (end > begin) {
          step(end - 1, Step::kAlone);
        } else {
          release_q();
        }
      }
      // Tiles at the right edge of the band, in the middle of it, at the left edge. The tile above
      // a plain one is clean.
      const i32 plain_end = min(min(full_end, w.clean_end - 1), end - 1);
      const i32 plain_begin = max(max(full_begin, w.clean_begin), begin);
      i32 tile = end - 2;
      while (tile >= begin) {
#pragma unroll 1
        for (; tile >= begin && (tile >= plain_end || tile < plain_begin); --tile)
          step(tile, Step::kEdge);
#pragma unroll 1
        for (; tile >= plain_begin && tile < plain_end; --tile) step(tile, Step::kPlain);
        ready = false;
      }
      pending = end > begin;
      if (pending) {
        wait_v();
        if (w.scanned(begin)) found |= wait_clean();
      }
      if (begin > w.begin) {
        lone_product();
        pending = false;
        skip(begin, w.begin);
      }
    }
  }
  if constexpr (S::kStaged && !kFloatOut) ptx::cp_async_bulk_wait_group_read<0>();
  if constexpr (kCluster > 1) {  // a CTA's shared memory stays until its peer is done with it
    __syncwarp();
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
  }
}

}  // namespace cuflash::sm90

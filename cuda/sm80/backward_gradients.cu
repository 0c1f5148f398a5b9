// dQ, dK and dV in one pass: one CTA per tile of keys of one key head. It walks all rows that see
// them, and all query heads of the group, in ascending order. dK and dV stay in registers; the
// tile's share of dQ, a product from zero, is added to fp32 sums in global memory.
//
// The key tiles of a head add to a block of rows in the Plan's order: each block has a count of the
// tiles that have added, and a CTA waits until it is its tile's turn. CTAs take tickets in the same
// order, so that a CTA waits only for CTAs that already run. What it added in one step its first
// warp announces in the next, or after the last; its last warp waits. So no announcement depends on
// a later turn: the running CTA with the lowest ticket waits for nobody, ends, and then the next.
// Where dQ is centred, sums of rows of dS are added at the same time in the same way.
#include "tile/center.cuh"
#include "tile/gradient.cuh"

namespace cuflash::sm80 {

// kBlockM: queries of a step (tile_m of the Plan where products are split or promoted), kBlockN:
// tile_n of the Plan, the keys of a CTA. kParts: halves that carry one P or dS.
template <class Half_, int kD_, int kDv_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_,
          int kParts_>
struct GradientShape {
  using Half = Half_;
  static constexpr int kD = kD_, kDv = kDv_, kBlockM = kBlockM_, kBlockN = kBlockN_,
                       kWarps = kWarps_, kStages = kStages_, kParts = kParts_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSlices = kD > 192 ? 2 : 1;  // dQ is made in slices of its columns
  using K = Tile<kBlockN, kD>;
  using V = Tile<kBlockN, kDv>;
  using Q = Tile<kBlockM, kD>;
  using DO = Tile<kBlockM, kDv>;
  using P = Tile<kBlockM, kBlockN>;  // and dS
  // Of a step: Q and dO, and LSE and delta of their rows.
  static constexpr int kStageBytes = Q::kBytes + DO::kBytes + kBlockM * 8;
  using Scores = WarpGrid<kBlockM, kBlockN, kWarps>;
  using DK = WarpGrid<kBlockN, kD, kWarps>;
  using DV = WarpGrid<kBlockN, kDv, kWarps>;
  using DQ = WarpGrid<kBlockM, kD / kSlices, kWarps>;
};

// acc += W^T B over the rows of a step, W a tile of P or dS in halves. Addresses are this lane's.
template <class S, class A, class Grid, class B>
__device__ __forceinline__ void over_rows(Block<Grid::kMi, Grid::kNj>& acc, u32 w_lane,
                                          u32 b_lane) {
  using P = typename S::P;
  constexpr int kDepth = S::kBlockM / 16;
  if (!Grid::busy()) return;
  auto load_a = [&](u32(&a)[4], int mi, int kk) {
    const int at = kk / kDepth * P::kBytes + kk % kDepth * 16 * P::kPitch;
    ptx::ldmatrix_x4_trans(a, w_lane + at + mi * 32);
  };
  auto load_b = [&](u32(&b)[4], int pair, int kk) {
    ptx::ldmatrix_x4_trans(b, b_lane + kk % kDepth * 16 * B::kPitch + pair * 32);
  };
  if constexpr (A::kPromoted) {
    add_product<typename S::Half, kDepth * S::kParts>(acc, load_a, load_b);
  } else {
    accumulate<typename S::Half, kDepth * S::kParts>(acc, load_a, load_b);
  }
}

// acc += A B^T, both with rows in shared memory.
template <class Half, class A, class B, int kMi, int kNj>
__device__ __forceinline__ void over_columns(Block<kMi, kNj>& acc, u32 a_lane, u32 b_lane) {
  accumulate<Half, A::kCols / 16>(
      acc,
      [&](u32(&a)[4], int mi, int kk) {
        ptx::ldmatrix_x4(a, a_lane + mi * 16 * A::kPitch + kk * 32);
      },
      [&](u32(&b)[4], int pair, int kk) {
        ptx::ldmatrix_x4(b, b_lane + pair * 16 * B::kPitch + kk * 32);
      });
}

// kCenter: dQ is centred; not under a softcap.
template <class S, class A, bool kSoftcap, bool kFloatOut, bool kCenter>
__global__ void __launch_bounds__(S::kThreads, 1)
    gradients(const __grid_constant__ GradientParams params) {
  using Half = typename S::Half;
  using Q = typename S::Q;
  using DO = typename S::DO;
  using K = typename S::K;
  using V = typename S::V;
  using P = typename S::P;
  using Scores = typename S::Scores;
  using DK = typename S::DK;
  using DV = typename S::DV;
  using DQ = typename S::DQ;
  constexpr int kBlockM = S::kBlockM, kBlockN = S::kBlockN, kThreads = S::kThreads;
  constexpr int kDepthN = kBlockN / 16 * S::kParts;
  extern __shared__ __align__(16) char shared[];
  __shared__ i32 ticket_of_all;
  const u32 k_tile = ptx::shared_address(shared), v_tile = k_tile + K::kBytes,
            stages = v_tile + V::kBytes, p_tile = stages + S::kStages * S::kStageBytes,
            ds_tile = p_tile + S::kParts * P::kBytes;
  char *const p_bytes = shared + (p_tile - k_tile), *const ds_bytes = shared + (ds_tile - k_tile);
  const int lane = threadIdx.x % 32, g = lane % 4;

  if (threadIdx.x == 0) ticket_of_all = atomicAdd(params.tickets, 1);
  __syncthreads();
  const Band& band = params.band;
  const i32 ticket = ticket_of_all;
  const i32 tiles = (band.n_k + kBlockN - 1) / kBlockN, kv_heads = params.heads / params.group;
  const i32 all_heads = gridDim.x / tiles;
  const i32 first_head = ticket / (params.interleave * tiles) * params.interleave;
  const i32 together = min(params.interleave, all_heads - first_head);
  const i32 place = ticket - first_head * tiles;
  const i32 tile = params.descending ? tiles - 1 - place / together : place / together;
  const i32 flat_kv_head = first_head + place % together;
  const i32 batch = flat_kv_head / kv_heads, kv_head = flat_kv_head % kv_heads;
  const i32 first_key = tile * kBlockN;

  // Rows that see some key of this CTA, and keys that some row sees; others are loaded as zeros,
  // whatever they hold.
  const RowsOfKey rows_of{band, 0, first_key};
  const i32 last_key = min(first_key + kBlockN, band.n_k) - 1 - first_key;
  const i32 row_begin = rows_of(0).low, row_end = rows_of(last_key).high;
  const i32 block_begin = row_begin / kBlockM;
  const i32 blocks = row_end > row_begin ? (row_end + kBlockM - 1) / kBlockM - block_begin : 0;
  const i32 steps = blocks * params.group;
  const i32 all_blocks = (band.n_q + kBlockM - 1) / kBlockM;
  const i32 key_low = band.low(0), key_high = band.high(band.n_q - 1);

  auto load_keys = [&] {
    load_tile<K, kThreads>(k_tile, params.k + params.k_strides.at(batch, kv_head),
                           params.k_strides.row, first_key, key_low, key_high, params.d);
  };
  // Blocks of rows in ascending order, for each head of the group.
  i32 head = kv_head * params.group, block = block_begin;
  auto next = [&] {
    if (++block < block_begin + blocks) return;
    block = block_begin;
    ++head;
  };
  auto load = [&](i32 step) {
    const i32 row = block * kBlockM;
    const u32 q_tile = stages + step % S::kStages * S::kStageBytes;
    load_tile<Q, kThreads>(q_tile, params.q + params.q_strides.at(batch, head),
                           params.q_strides.row, row, row_begin, row_end, params.d);
    load_tile<DO, kThreads>(q_tile + Q::kBytes, params.dout + params.dout_strides.at(batch, head),
                            params.dout_strides.row, row, row_begin, row_end, params.d_v);
    if (threadIdx.x < kBlockM / 2) {  // four LSE or, behind them, deltas
      const float* from = threadIdx.x < kBlockM / 4 ? params.lse2 : params.delta - kBlockM;
      from += static_cast<i64>(batch * params.heads + head) * params.pitch + row;
      const u32 to = q_tile + Q::kBytes + DO::kBytes;
      ptx::cp_async_16(to + threadIdx.x * 16, from + threadIdx.x * 4, true);
    }
    ptx::cp_async_commit();
  };

  // This lane's addresses in the tiles, as the products read them: rows or columns of the scores,
  // of dV and dK, of dQ.
  constexpr bool kSameWidth = S::kD == S::kDv;
  const u32 q_lane = ptx::kept(a_address<Q>(stages, Scores::row(), 0)),
            k_lane = ptx::kept(b_address<K>(k_tile, Scores::column(), 0));
  const u32 do_lane =
      kSameWidth ? q_lane + Q::kBytes : a_address<DO>(stages + Q::kBytes, Scores::row(), 0);
  const u32 v_lane = kSameWidth ? k_lane + K::kBytes : b_address<V>(v_tile, Scores::column(), 0);
  const u32 p_over_rows = ptx::kept(b_address<P>(p_tile, 0, DV::row())),
            do_over_rows = ptx::kept(bt_address<DO>(stages + Q::kBytes, 0, DV::column()));
  const u32 ds_over_rows =
      kSameWidth ? p_over_rows + S::kParts * P::kBytes : b_address<P>(ds_tile, 0, DK::row());
  const u32 q_over_rows =
      kSameWidth ? do_over_rows - Q::kBytes : bt_address<Q>(stages, 0, DK::column());
  const u32 ds_lane = ptx::kept(a_address<P>(ds_tile, DQ::row(), 0)),
            k_over_keys = ptx::kept(bt_address<K>(k_tile, 0, DQ::column()));
  char* const p_lane = shared + ptx::kept(p_tile - k_tile + (Scores::row() + lane / 4) * P::kPitch +
                                          Scores::column() * 2 + g * 4);
  char* const rows_lane =
      shared + (stages - k_tile) + Q::kBytes + DO::kBytes + (Scores::row() + lane / 4) * 4;

  Block<DK::kMi, DK::kNj> dk = {};
  Block<DV::kMi, DV::kNj> dv = {};
  bool key_specials = false;
  // What this CTA has added and not yet announced: the block, and its count. (Blocks fit in 32
  // bits: the sums of each take 2 kB or more.)
  i32 held_at = 0, held = 0;
  // By one thread for all, after a barrier behind their stores.
  auto release = [&] {
    if (threadIdx.x != 0 || held == 0) return;
    ptx::st_release_gpu(params.turns + held_at, held);
  };

  if (steps > 0) {
    load_keys();
    load_tile<V, kThreads>(v_tile, params.v + params.v_strides.at(batch, kv_head),
                           params.v_strides.row, first_key, key_low, key_high, params.d_v);
    load(0);
  }

  for (i32 step = 0; step < steps; ++step) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step's rows have arrived; those of the step before,
                      // and its P and dS, have been read, and its dQ is written
    const i32 first_row = block * kBlockM, flat_head = batch * params.heads + head;
    const i32 block_at = flat_head * all_blocks + block;
    const i32 last_row = first_row + kBlockM - 1, last_real = min(last_row, band.n_q - 1);
    // dQ: how many key tiles add to this block of rows before this one, and whether one comes
    // after.
    const i32 low_tile = static_cast<u32>(band.low(first_row)) / kBlockN,
              high_tile = (static_cast<u32>(band.high(last_real)) + kBlockN - 1) / kBlockN;
    const i32 turn = params.descending ? high_tile - 1 - tile : tile - low_tile;
    const bool last = tile == (params.descending ? low_tile : high_tile - 1);
    // One thread of the last warp asks early, and again, if need be, before the barrier that all
    // cross before they read the sums.
    const bool asks = threadIdx.x == kThreads - 32 && turn > 0;
    i32 added = 0;
    if (asks) added = ptx::ld_relaxed_gpu(params.turns + block_at);

    next();
    if (S::kStages == 2 && step + 1 < steps) load(step + 1);
    if (step == 0) key_specials = __syncthreads_or(holds_nonfinite<Half, K, kThreads>(shared));
    const u32 stage = step % S::kStages * S::kStageBytes;
    const bool masked = (last_row >= band.n_q) | (band.low(last_row) > first_key) |
                        (band.high(first_row) < first_key + kBlockN);
    const KeysOfRow keys_seen{band, first_row, first_key};
    const RowsOfKey rows_seen{band, first_row, first_key};

    if (Scores::busy()) {
      const float* const rows = reinterpret_cast<const float*>(rows_lane + stage);
      float lse2[Scores::kMi * 2], delta[Scores::kMi * 2];
#pragma unroll
      for (int i = 0; i < Scores::kMi * 2; ++i) lse2[i] = rows[i * 8];
      Block<Scores::kMi, Scores::kNj> s = {}, p, ds = {};
      over_columns<Half, Q, K>(s, q_lane + stage, k_lane);
      release();
#pragma unroll
      for (int i = 0; i < Scores::kMi * 2; ++i) {
#pragma unroll
        for (int j = 0; j < Scores::kNj * 2; ++j) {
          float& score = s[i / 2][i % 2][j / 2][j % 2];
          if constexpr (kSoftcap) score = capped(score, params.cap);
          p[i / 2][i % 2][j / 2][j % 2] =
              probability<A>(score, params.c, lse2[i], Scores::column() / 8 + j / 2);
        }
      }
      over_columns<Half, DO, V>(ds, do_lane + stage, v_lane);
#pragma unroll
      for (int i = 0; i < Scores::kMi * 2; ++i) delta[i] = rows[kBlockM + i * 8];
#pragma unroll
      for (int i = 0; i < Scores::kMi * 2; ++i) {
#pragma unroll
        for (int j = 0; j < Scores::kNj * 2; ++j) {
          float& x = ds[i / 2][i % 2][j / 2][j % 2];
          x = score_gradient<kSoftcap>(p[i / 2][i % 2][j / 2][j % 2], x, delta[i],
                                       s[i / 2][i % 2][j / 2][j % 2]);
        }
      }
      if (masked) clear_unseen(p, ds, Scores::row(), Scores::column(), keys_seen);
      store_halves<Half, P, S::kParts>(p_lane, p);
      store_halves<Half, P, S::kParts>(p_lane + S::kParts * P::kBytes, ds);
    }
    if (asks) {
      while (added != turn) added = ptx::ld_relaxed_gpu(params.turns + block_at);
      ptx::fence_acquire_gpu();
    }

    char *const q_bytes = shared + (stages - k_tile) + stage, *const do_bytes = q_bytes + Q::kBytes;
    bool specials = false;
    if (masked) {
      specials = __syncthreads_or(key_specials || holds_nonfinite<Half, Q, kThreads>(q_bytes) ||
                                  holds_nonfinite<Half, DO, kThreads>(do_bytes));
      if (specials) {
        zero_nonfinite<Half, Q, kThreads>(q_bytes);
        zero_nonfinite<Half, DO, kThreads>(do_bytes);
        zero_nonfinite<Half, K, kThreads>(shared);
        __syncthreads();
      }
    } else {
      __syncthreads();  // P and dS are there
    }

    auto add_to_dv = [&] {
      over_rows<S, A, DV, DO>(dv, p_over_rows, do_over_rows + stage);
      if (!specials || !DV::busy()) return;
      add_specials<Half, S::kParts>(
          dv, Weights{p_bytes, P::kBytes, 2, P::kPitch},
          params.dout + params.dout_strides.at(batch, flat_head - batch * params.heads, first_row),
          params.dout_strides.row, kBlockM, params.d_v, DV::row(), DV::column(), rows_seen);
    };
    auto add_to_dk = [&] {
      over_rows<S, A, DK, Q>(dk, ds_over_rows, q_over_rows + stage);
      if (!specials || !DK::busy()) return;
      add_specials<Half, S::kParts>(
          dk, Weights{ds_bytes, P::kBytes, 2, P::kPitch},
          params.q + params.q_strides.at(batch, flat_head - batch * params.heads, first_row),
          params.q_strides.row, kBlockM, params.d, DK::row(), DK::column(), rows_seen);
    };

    // Whether some row of the block is centred.
    bool any = false;
    if constexpr (kCenter)
      any = Centered::of(params, ptx::opaque(batch), ptx::opaque(kv_head))
                .template any<kBlockM>(first_row);
    // Sums of the rows of dS: its product with a column of ones. Warps take 16 rows each.
    auto row_sum = [&](int m) {
      return params.row_sums + static_cast<i64>(block_at) * kBlockM + m;
    };
    auto add_row_sums = [&] {
#pragma unroll 1
      for (int m = threadIdx.x / 32 * 16; m < kBlockM; m += S::kWarps * 16) {
        float x[2][2] = {};
        const u32 rows = a_address<P>(ds_tile, m, 0);
#pragma unroll 2
        for (int kk = 0; kk < kDepthN; ++kk) {
          u32 a[4];
          ptx::ldmatrix_x4(a, rows + kk / (kBlockN / 16) * P::kBytes + kk % (kBlockN / 16) * 32);
          Half::mma(x[0][0], x[0][1], x[1][0], x[1][1], a, Half::kOnes, Half::kOnes);
        }
        if (g > 1) continue;  // columns of the product are alike
        float* const at = row_sum(m + g * 8 + lane / 4);
        const float r = g == 0 ? x[0][0] : x[1][0];
        ptx::st_cg(at, turn > 0 ? __fadd_rn(ptx::ld_cg(at), r) : r);
      }
    };
    constexpr int kPieces = DQ::kMi * DQ::kNj;  // of four sums a thread
    constexpr int kStride = DQ::kRows * DQ::kColumns * 32;
    auto sums_of = [&](int slice) {
      return reinterpret_cast<float4*>(params.sums) +
             ((static_cast<i64>(block_at) * S::kSlices + slice) * kPieces * kStride + threadIdx.x);
    };
    // Piece i of a thread's, x, whose first column of the head is n.
    auto write = [&](const float4& x, i32 row_of_dq, int n) {
      if (row_of_dq >= band.n_q) return;
      const i64 to = params.dq_strides.at(batch, flat_head - batch * params.heads, row_of_dq);
      if (n < params.d)
        store_pair<Half, kFloatOut>(params.dq, to + n, __fmul_rn(x.x, params.scale),
                                    __fmul_rn(x.y, params.scale));
      if (n + 8 < params.d)
        store_pair<Half, kFloatOut>(params.dq, to + n + 8, __fmul_rn(x.z, params.scale),
                                    __fmul_rn(x.w, params.scale));
    };
    // dQ of a block with a centred row, all of which has been added: less R c, c in the place of P.
    // It comes back from the sums when nothing else is held beside dK and dV.
    auto write_centered = [&] {
      constexpr int kWidth = S::kD / S::kSlices, kRoom = S::kParts * P::kBytes / (kWidth * 4);
      using Rows = Kinds<kBlockM>;
      constexpr int kTogether = Rows::kMost < kRoom ? Rows::kMost : kRoom;
      static_assert(kTogether > 0, "c of one kind of row takes the place of P");
      float* const means = reinterpret_cast<float*>(p_bytes);
      const Centered centered = Centered::of(params, ptx::opaque(batch), ptx::opaque(kv_head));
      const Rows kinds(band, ptx::opaque(first_row), params.center);
      const int count = kinds.count();
#pragma unroll 1
      for (int round = 0; round < S::kSlices * ((count + kTogether - 1) / kTogether); ++round) {
        const int slice = round % S::kSlices, first = round / S::kSlices * kTogether;
        const int now = min(kTogether, count - first);
        const u16* const k = params.k +
                             params.k_strides.at(ptx::opaque(batch), ptx::opaque(kv_head)) +
                             slice * kWidth;
        __syncthreads();  // what was in this place has been read, and rows' sums are written
#pragma unroll 1
        for (int i = threadIdx.x; i < now * (kWidth / 2); i += kThreads) {
          const int kind = i / (kWidth / 2), n = i % (kWidth / 2) * 2;
          const Groups groups =
              Groups::of(band, first_row + kinds.row(first + kind), params.center);
          float2 c = make_float2(0.0f, 0.0f);
          if (groups.length > 0 && slice * kWidth + n < params.d)
            c = groups.mean<Half>(k + n, params.k_strides.row);
          *reinterpret_cast<float2*>(means + kind * kWidth + n) = c;
        }
        __syncthreads();
        if (!DQ::busy()) continue;
#pragma unroll 1
        for (int i = 0; i < DQ::kMi * 2; ++i) {
          const int m = DQ::row() + i * 8 + lane / 4, kind = kinds.of(m) - first;
          const i32 row_of_dq = first_row + m;
          if (kind < 0 || kind >= now || row_of_dq >= band.n_q) continue;
          const bool mine = centered.row(row_of_dq);
          float r = 0.0f;
          if (mine) r = ptx::ld_cg(row_sum(m));
          if (mine && params.dlse != nullptr)
            r = __fsub_rn(r, params.dlse[static_cast<i64>(flat_head) * band.n_q + row_of_dq]);
#pragma unroll
          for (int j = 0; j < DQ::kNj / 2; ++j) {
            float4 x = ptx::ld_cg(sums_of(slice) + (i * (DQ::kNj / 2) + j) * kStride);
            const int n = DQ::column() + j * 16 + g * 2;
            if (mine) {
              const float* const at = means + kind * kWidth + n;
              const float2 c = *reinterpret_cast<const float2*>(at),
                           d = *reinterpret_cast<const float2*>(at + 8);
              x = make_float4(__fmaf_rn(-r, c.x, x.x), __fmaf_rn(-r, c.y, x.y),
                              __fmaf_rn(-r, d.x, x.z), __fmaf_rn(-r, d.y, x.w));
            }
            write(x, row_of_dq, slice * kWidth + n);
          }
        }
      }
    };
    if (any) add_row_sums();
#pragma unroll
    for (int slice = 0; slice < S::kSlices; ++slice) {
      const int row = DQ::row(), column = DQ::column() + slice * (S::kD / S::kSlices);
      Block<DQ::kMi, DQ::kNj> share = {};
      float4 sum[kPieces];
      float4* const sums = sums_of(slice);
      if (DQ::busy()) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (turn > 0) sum[i] = ptx::ld_cg(sums + i * kStride);
        }
      }
      // The sums are on their way meanwhile.
      if (slice == 0) add_to_dv();
      if (slice == 1) add_to_dk();
      if (DQ::busy()) {
        accumulate<Half, kDepthN>(
            share,
            [&](u32(&a)[4], int mi, int kk) {
              const int at = kk / (kBlockN / 16) * P::kBytes + kk % (kBlockN / 16) * 32;
              ptx::ldmatrix_x4(a, ds_lane + at + mi * 16 * P::kPitch);
            },
            [&](u32(&b)[4], int pair, int kk) {
              const int at =
                  kk % (kBlockN / 16) * 16 * K::kPitch + slice * (S::kD / S::kSlices) * 2;
              ptx::ldmatrix_x4_trans(b, k_over_keys + at + pair * 32);
            });
        if (specials) {
          add_specials<Half, S::kParts>(share, Weights{ds_bytes, P::kBytes, P::kPitch, 2},
                                        params.k + params.k_strides.at(batch, kv_head, first_key),
                                        params.k_strides.row, kBlockN, params.d, row, column,
                                        keys_seen);
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const float* const x = &share[0][0][0][0] + i * 4;
          sum[i].x = __fadd_rn(sum[i].x, x[0]);
          sum[i].y = __fadd_rn(sum[i].y, x[1]);
          sum[i].z = __fadd_rn(sum[i].z, x[2]);
          sum[i].w = __fadd_rn(sum[i].w, x[3]);
        }
      }
      if (DQ::busy()) {
        if (!last || any) {
#pragma unroll
          for (int i = 0; i < kPieces; ++i) ptx::st_cg(sums + i * kStride, sum[i]);
        } else {
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            const int at = i * 2 % DQ::kNj, h = i * 2 / DQ::kNj % 2, mi = i / DQ::kNj;
            write(sum[i], first_row + row + mi * 16 + h * 8 + lane / 4, column + at * 8 + g * 2);
          }
        }
      }
    }
    if (S::kSlices == 1) add_to_dk();
    if (last && any) write_centered();
    held_at = block_at;
    held = last ? 0 : turn + 1;
    if (specials) {  // the next step needs K as it is
      __syncthreads();
      load_keys();
      ptx::cp_async_commit();
    }
    if (S::kStages == 1 && step + 1 < steps) {
      __syncthreads();
      load(step + 1);
    }
  }

  __syncthreads();
  release();
  if (DK::busy()) {
#pragma unroll
    for (int i = 0; i < DK::kMi * 2; ++i) {
      const i32 key = first_key + DK::row() + i * 8 + lane / 4;
      if (key >= band.n_k) continue;
      const i64 to = params.dk_strides.at(batch, kv_head, key);
#pragma unroll
      for (int j = 0; j < DK::kNj; ++j) {
        const int n = DK::column() + j * 8 + g * 2;
        const float (&x)[2] = dk[i / 2][i % 2][j];
        if (n < params.d)
          store_pair<Half, kFloatOut>(params.dk, to + n, __fmul_rn(x[0], params.scale),
                                      __fmul_rn(x[1], params.scale));
      }
    }
  }
  if (DV::busy()) {
#pragma unroll
    for (int i = 0; i < DV::kMi * 2; ++i) {
      const i32 key = first_key + DV::row() + i * 8 + lane / 4;
      if (key >= band.n_k) continue;
      const i64 to = params.dv_strides.at(batch, kv_head, key);
#pragma unroll
      for (int j = 0; j < DV::kNj; ++j) {
        const int n = DV::column() + j * 8 + g * 2;
        const float (&x)[2] = dv[i / 2][i % 2][j];
        if (n < params.d_v) store_pair<Half, kFloatOut>(params.dv, to + n, x[0], x[1]);
      }
    }
  }
}

}  // namespace cuflash::sm80

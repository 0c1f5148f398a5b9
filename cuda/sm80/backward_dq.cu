// dQ: one CTA per block of rows of one query head. It walks the key tiles that the rows see in the
// Plan's order; each tile's share is a product from zero in the tensor core, added to dQ in fp32.
#include "tile/gradient.cuh"

namespace cuflash::sm80 {

// kTileN: tile_n of the Plan.
template <class Half_, int kD_, int kDv_, int kBlockM_, int kTileN_, int kStages_>
struct QueryShape {
  using Half = Half_;
  static constexpr int kD = kD_, kDv = kDv_, kBlockM = kBlockM_, kTileN = kTileN_,
                       kStages = kStages_;
  static constexpr int kMmaRows = kBlockM / 64;  // m16 blocks of a warp
  // Keys whose scores are held at once; of the rest of a tile only dS is, in halves.
  static constexpr int kChunk = kTileN % 64 == 0   ? 64
                                : kTileN % 48 == 0 ? 48
                                : kTileN % 32 == 0 ? 32
                                                   : 16;
  static constexpr int kGroups = kChunk / 8;
  using Q = Tile<kBlockM, kD>;
  using DO = Tile<kBlockM, kDv>;
  using K = Tile<kTileN, kD>;
  using V = Tile<kTileN, kDv>;
  // V has been read when a map of K's specials is needed: there it is put.
  static constexpr int kStageBytes = K::kBytes + max_of(V::kBytes, SpecialMap<K>::kBytes);
};

template <class S, class A, bool kSoftcap, bool kFloatOut>
__global__ void __launch_bounds__(kThreads, 1)
    queries(const __grid_constant__ GradientParams params) {
  using Half = typename S::Half;
  constexpr int kMmaRows = S::kMmaRows, kGroups = S::kGroups, kTileN = S::kTileN;
  extern __shared__ __align__(16) char shared[];
  const u32 q_tile = ptx::shared_address(shared), do_tile = q_tile + S::Q::kBytes;
  const u32 stages = do_tile + S::DO::kBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane % 4;

  // Late rows first: under a causal mask they have the most tiles.
  const Band& band = params.band;
  const i32 blocks = (band.n_q + S::kBlockM - 1) / S::kBlockM;
  const i32 first_row = (blocks - 1 - static_cast<i32>(blockIdx.x % blocks)) * S::kBlockM;
  const i32 last_row = min(first_row + S::kBlockM, band.n_q) - 1;
  const i32 flat_head = blockIdx.x / blocks, batch = flat_head / params.heads,
            head = flat_head % params.heads;
  const u16* k = params.k + params.k_strides.at(batch, head / params.group);
  const u16* v = params.v + params.v_strides.at(batch, head / params.group);

  // Keys that some row of this CTA sees; others are loaded as zeros, whatever they hold.
  const i32 key_low = band.low(first_row), key_high = band.high(last_row);
  const i32 tile_begin = key_low / kTileN,
            tile_end = key_high > key_low ? (key_high + kTileN - 1) / kTileN : 0;
  const i32 steps = tile_end - tile_begin;
  auto first_key_of = [&](i32 step) {
    return (params.descending ? tile_end - 1 - step : tile_begin + step) * kTileN;
  };
  auto load = [&](i32 step) {
    const u32 k_tile = stages + step % S::kStages * S::kStageBytes;
    const i32 first_key = first_key_of(step);
    load_tile<typename S::K, kThreads>(k_tile, k, params.k_strides.row, first_key, key_low,
                                       key_high, params.d);
    load_tile<typename S::V, kThreads>(k_tile + S::K::kBytes, v, params.v_strides.row, first_key,
                                       key_low, key_high, params.d_v);
    ptx::cp_async_commit();
  };

  float lse2[kMmaRows][2], delta[kMmaRows][2];
#pragma unroll
  for (int i = 0; i < kMmaRows * 2; ++i) {
    const i64 row =
        first_row + i / 2 * 64 + warp * 16 + i % 2 * 8 + lane / 4;  // < pitch, a multiple of 128
    lse2[i / 2][i % 2] = params.lse2[static_cast<i64>(flat_head) * params.pitch + row];
    delta[i / 2][i % 2] = params.delta[static_cast<i64>(flat_head) * params.pitch + row];
  }
  Block<kMmaRows, S::kD / 8> dq = {};

  if (steps > 0) {
    load_tile<typename S::Q, kThreads>(q_tile, params.q + params.q_strides.at(batch, head),
                                       params.q_strides.row, first_row, 0, band.n_q, params.d);
    load_tile<typename S::DO, kThreads>(do_tile, params.dout + params.dout_strides.at(batch, head),
                                        params.dout_strides.row, first_row, 0, band.n_q,
                                        params.d_v);
    load(0);
  }

  for (i32 step = 0; step < steps; ++step) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step's keys have arrived; those of the step before have been read
    if (S::kStages == 2 && step + 1 < steps) load(step + 1);
    const u32 k_tile = stages + step % S::kStages * S::kStageBytes, v_tile = k_tile + S::K::kBytes;
    const i32 first_key = first_key_of(step);
    const bool masked = band.low(last_row) > first_key || band.high(first_row) < first_key + kTileN;

    Operand<kMmaRows, A::kSplit ? 2 : 1, kTileN / 16> a;
#pragma unroll
    for (int chunk = 0; chunk < kTileN; chunk += S::kChunk) {
      Block<kMmaRows, kGroups> s, dp;
      product<Half, typename S::Q, typename S::K>(s, q_tile, k_tile, chunk);
      product<Half, typename S::DO, typename S::V>(dp, do_tile, v_tile, chunk);
#pragma unroll
      for (int mi = 0; mi < kMmaRows; ++mi) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float t = s[mi][h][j][e];
              if constexpr (kSoftcap) t = capped(t, params.cap);
              const float p = probability<A>(t, params.c, lse2[mi][h], chunk / 8 + j);
              float& ds = dp[mi][h][j][e];
              ds = score_gradient<kSoftcap>(p, ds, delta[mi][h], t);
            }
          }
        }
      }
      if (masked) clear_unseen(dp, KeysOfRow{band, first_row, first_key + chunk});
      pack<Half>(a, dp, chunk / 16);
    }
    u16* const map = reinterpret_cast<u16*>(shared + (v_tile - q_tile));
    bool specials = false;
    if (masked) {
      __syncthreads();  // all warps have their scores
      specials = __syncthreads_or(
          sanitise<Half, typename S::K, kThreads>(shared + (k_tile - q_tile), map));
    }
    add_product<Half, typename S::K>(dq, a, k_tile);
    if (specials)
      add_specials<Half, typename S::K>(dq, a, map, KeysOfRow{band, first_row, first_key});
    if (S::kStages == 1 && step + 1 < steps) {
      __syncthreads();
      load(step + 1);
    }
  }

#pragma unroll
  for (int i = 0; i < kMmaRows * 2; ++i) {
    const int mi = i / 2, h = i % 2;
    const i32 row = first_row + mi * 64 + warp * 16 + h * 8 + lane / 4;
    if (row >= band.n_q) continue;
#pragma unroll
    for (int j = 0; j < S::kD / 8; ++j) {
      if (j * 8 >= params.d) continue;
      store_pair<Half, kFloatOut>(params.dq, params.dq_strides.at(batch, head, row) + j * 8 + g * 2,
                                  __fmul_rn(dq[mi][h][j][0], params.scale),
                                  __fmul_rn(dq[mi][h][j][1], params.scale));
    }
  }
}

}  // namespace cuflash::sm80

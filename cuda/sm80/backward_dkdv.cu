// dK and dV: one CTA per block of keys of one key head. It walks all rows that see them, and all
// query heads of the group, in ascending order; no other CTA adds to its sums, so they have one
// order.
//
// Scores are formed transposed, S^T = K Q^T, keys by queries: every element is the same fused dot
// products as in S, and accumulators of P^T and dS^T already lie as A operands of dV += P^T dO and
// dK += dS^T Q. Neither goes through shared memory. Rows are cut into steps of 16 from row 0, so a
// row that sees nothing is an exact zero wherever blocks begin.
#include "tile/gradient.cuh"

namespace cuflash::sm80 {

// Where accumulators of both would not fit, two passes form one each.
enum class Gradient { kBoth, kKeys, kValues };

// kBlockM: queries of a step (tile_m of the Plan where products are split or promoted), kBlockN:
// keys of a CTA.
template <class Half_, int kD_, int kDv_, int kBlockM_, int kBlockN_, int kStages_>
struct KeyShape {
  using Half = Half_;
  static constexpr int kD = kD_, kDv = kDv_, kBlockM = kBlockM_, kBlockN = kBlockN_,
                       kStages = kStages_;
  static constexpr int kMmaRows = kBlockN / 64;  // m16 blocks of a warp
  static constexpr int kGroups = kBlockM / 8;    // n8 blocks of the transposed scores
  using K = Tile<kBlockN, kD>;
  using V = Tile<kBlockN, kDv>;
  using Q = Tile<kBlockM, kD>;
  using DO = Tile<kBlockM, kDv>;
  // A pass that forms one gradient has read the other's tile when it needs a map of specials: there
  // it is put.
  static constexpr int kQBytes = max_of(Q::kBytes, SpecialMap<DO>::kBytes);
  static constexpr int kStageBytes = kQBytes + max_of(DO::kBytes, SpecialMap<Q>::kBytes);
};

template <class S, class A, Gradient kWhat, bool kSoftcap, bool kFloatOut>
__global__ void __launch_bounds__(kThreads, 1)
    keys_and_values(const __grid_constant__ GradientParams params) {
  using Half = typename S::Half;
  constexpr int kMmaRows = S::kMmaRows, kGroups = S::kGroups, kBlockM = S::kBlockM,
                kBlockN = S::kBlockN;
  constexpr int kParts = A::kSplit ? 2 : 1;
  constexpr bool kKeys = kWhat != Gradient::kValues, kValues = kWhat != Gradient::kKeys;
  extern __shared__ __align__(16) char shared[];
  const u32 k_tile = ptx::shared_address(shared);
  const u32 v_tile = k_tile + S::K::kBytes;
  const u32 stages = v_tile + (kKeys ? S::V::kBytes : 0),
            maps = stages + S::kStages * S::kStageBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane % 4;

  // Early keys first: under a causal mask most rows see them.
  const Band& band = params.band;
  const i32 tiles = (band.n_k + kBlockN - 1) / kBlockN;
  const i32 first_key = static_cast<i32>(blockIdx.x % tiles) * kBlockN;
  const i32 kv_heads = params.heads / params.group, flat_head = blockIdx.x / tiles;
  const i32 batch = flat_head / kv_heads, kv_head = flat_head % kv_heads;

  // Rows that see some key of this CTA; others are loaded as zeros, whatever they hold.
  const RowsOfKey rows_of{band, 0, first_key};
  const i32 last_key = min(first_key + kBlockN, band.n_k) - 1 - first_key;
  const i32 row_begin = rows_of(0).low, row_end = rows_of(last_key).high;
  const i32 block_begin = row_begin / kBlockM;
  const i32 blocks = row_end > row_begin ? (row_end + kBlockM - 1) / kBlockM - block_begin : 0;
  const i32 steps = blocks * params.group;

  auto load = [&](i32 step) {
    const i32 head = kv_head * params.group + step / blocks,
              row = (block_begin + step % blocks) * kBlockM;
    const u32 q_tile = stages + step % S::kStages * S::kStageBytes;
    load_tile<typename S::Q, kThreads>(q_tile, params.q + params.q_strides.at(batch, head),
                                       params.q_strides.row, row, row_begin, row_end, params.d);
    load_tile<typename S::DO, kThreads>(
        q_tile + S::kQBytes, params.dout + params.dout_strides.at(batch, head),
        params.dout_strides.row, row, row_begin, row_end, params.d_v);
    ptx::cp_async_commit();
  };

  Block<kMmaRows, kKeys ? S::kD / 8 : 2> dk = {};
  Block<kMmaRows, kValues ? S::kDv / 8 : 2> dv = {};

  if (steps > 0) {
    load_tile<typename S::K, kThreads>(k_tile, params.k + params.k_strides.at(batch, kv_head),
                                       params.k_strides.row, first_key, 0, band.n_k, params.d);
    if constexpr (kKeys) {
      load_tile<typename S::V, kThreads>(v_tile, params.v + params.v_strides.at(batch, kv_head),
                                         params.v_strides.row, first_key, 0, band.n_k, params.d_v);
    }
    load(0);
  }

  for (i32 step = 0; step < steps; ++step) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step's rows have arrived; those of the step before have been read
    if (S::kStages == 2 && step + 1 < steps) load(step + 1);
    const u32 q_tile = stages + step % S::kStages * S::kStageBytes, do_tile = q_tile + S::kQBytes;
    const i32 head = kv_head * params.group + step / blocks,
              first_row = (block_begin + step % blocks) * kBlockM;
    const i32 last_row = first_row + kBlockM - 1;
    const bool masked = last_row >= band.n_q || band.low(last_row) > first_key ||
                        band.high(first_row) < first_key + kBlockN;
    const RowsOfKey seen{band, first_row, first_key};

    Block<kMmaRows, kGroups> s, p;
    product<Half, typename S::K, typename S::Q>(s, k_tile, q_tile, 0);
    const i64 row_at = (static_cast<i64>(batch) * params.heads + head) * params.pitch + first_row;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const float2 lse2 =
          __ldg(reinterpret_cast<const float2*>(params.lse2 + row_at + j * 8 + g * 2));
#pragma unroll
      for (int mi = 0; mi < kMmaRows; ++mi) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = mi * 64 + warp * 16;
          const int group =
              A::kExp2 == Exp2::kMixed ? (first_key + key) % params.tile_n / 8 + h : 0;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = s[mi][h][j][e];
            if constexpr (kSoftcap) score = capped(score, params.cap);
            p[mi][h][j][e] = probability<A>(score, params.c, e == 0 ? lse2.x : lse2.y, group);
          }
        }
      }
    }
    if (masked) clear_unseen(p, seen);

    Operand<kMmaRows, kParts, kGroups / 2> a_p, a_ds;
    if constexpr (kValues) pack<Half>(a_p, p, 0);
    if constexpr (kKeys) {
      Block<kMmaRows, kGroups> ds;
      product<Half, typename S::V, typename S::DO>(ds, v_tile, do_tile, 0);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const float2 delta =
            __ldg(reinterpret_cast<const float2*>(params.delta + row_at + j * 8 + g * 2));
#pragma unroll
        for (int mi = 0; mi < kMmaRows; ++mi) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& x = ds[mi][h][j][e];
              x = score_gradient<kSoftcap>(p[mi][h][j][e], x, e == 0 ? delta.x : delta.y,
                                           s[mi][h][j][e]);
            }
          }
        }
      }
      if (masked) clear_unseen(ds, seen);
      pack<Half>(a_ds, ds, 0);
    }

    char *const q_bytes = shared + (q_tile - k_tile), *const do_bytes = shared + (do_tile - k_tile);
    u16* const q_map = reinterpret_cast<u16*>(kValues ? shared + (maps - k_tile) : do_bytes);
    u16* const do_map =
        kKeys ? q_map + SpecialMap<typename S::Q>::kBytes / 2 : reinterpret_cast<u16*>(q_bytes);
    bool specials = false;
    if (masked) {
      __syncthreads();  // all warps have their scores
      bool found = false;
      if constexpr (kKeys) found |= sanitise<Half, typename S::Q, kThreads>(q_bytes, q_map);
      if constexpr (kValues) found |= sanitise<Half, typename S::DO, kThreads>(do_bytes, do_map);
      specials = __syncthreads_or(found);
    }
    if constexpr (kValues) {
      if constexpr (A::kPromoted) {
        add_product<Half, typename S::DO>(dv, a_p, do_tile);
      } else {
        accumulate<Half, typename S::DO>(dv, a_p, do_tile);
      }
      if (specials) add_specials<Half, typename S::DO>(dv, a_p, do_map, seen);
    }
    if constexpr (kKeys) {
      if constexpr (A::kPromoted) {
        add_product<Half, typename S::Q>(dk, a_ds, q_tile);
      } else {
        accumulate<Half, typename S::Q>(dk, a_ds, q_tile);
      }
      if (specials) add_specials<Half, typename S::Q>(dk, a_ds, q_map, seen);
    }
    if (S::kStages == 1 && step + 1 < steps) {
      __syncthreads();
      load(step + 1);
    }
  }

#pragma unroll
  for (int i = 0; i < kMmaRows * 2; ++i) {
    const int mi = i / 2, h = i % 2;
    const i32 key = first_key + mi * 64 + warp * 16 + h * 8 + lane / 4;
    if (key >= band.n_k) continue;
    if constexpr (kKeys) {
#pragma unroll
      for (int j = 0; j < S::kD / 8; ++j) {
        if (j * 8 >= params.d) continue;
        store_pair<Half, kFloatOut>(
            params.dk, params.dk_strides.at(batch, kv_head, key) + j * 8 + g * 2,
            __fmul_rn(dk[mi][h][j][0], params.scale), __fmul_rn(dk[mi][h][j][1], params.scale));
      }
    }
    if constexpr (kValues) {
#pragma unroll
      for (int j = 0; j < S::kDv / 8; ++j) {
        if (j * 8 >= params.d_v) continue;
        store_pair<Half, kFloatOut>(params.dv,
                                    params.dv_strides.at(batch, kv_head, key) + j * 8 + g * 2,
                                    dv[mi][h][j][0], dv[mi][h][j][1]);
      }
    }
  }
}

}  // namespace cuflash::sm80

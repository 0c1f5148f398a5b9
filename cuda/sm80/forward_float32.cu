// Forward attention of float32 arrays for any GPU since Ampere. One CTA takes kBlockM rows of one
// head, 16 a warp, and walks the tiles of keys from right to left. A tile arrives as it is by
// cp.async and is then split into bfloat16 terms (tile/float32.cuh); K and V take turns in one
// buffer. The arithmetic is that of emulation/tiled.py.
#include "tile/float32.cuh"
#include "tile/softmax.cuh"

namespace cuflash::sm80 {

struct ForwardParams {
  const float *q, *k, *v;
  float *out, *lse;  // lse: (batch, heads, n_q)
  Strides q_strides, k_strides, v_strides, out_strides;
  Band band;
  i32 heads, group;  // query heads, query heads per key head
  i32 d, d_v;
  float c;            // a score times c is in log2 units
  float cap;          // softcap: a score times cap is the argument of tanh
  float stale_limit;  // "stale": a lane's sum above this moves the reference
};

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

template <int kD_, int kDv_, int kBlockM_, int kBlockN_>
struct Shape {
  static constexpr int kD = kD_, kDv = kDv_, kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kThreads = kBlockM * 2;
  static constexpr int kGroups = kBlockN / 8;  // n8 blocks of a tile of scores
  using Q = Tile<kBlockM, kD>;
  using K = Tile<kBlockN, kD>;
  using V = Tile<kBlockN, kDv>;
  static constexpr int kOperand = 3 * Q::kBytes;  // where the terms of K or V begin
  static constexpr int kRaw = kOperand + 3 * larger(K::kBytes, V::kBytes);
  static constexpr int kMap = kRaw + larger(Raw<K>::kBytes, Raw<V>::kBytes);
};

template <class S, class A, bool kSoftcap>
__global__ void __launch_bounds__(S::kThreads, 1)
    forward(const __grid_constant__ ForwardParams params) {
  using K = typename S::K;
  using V = typename S::V;
  constexpr int kGroups = S::kGroups, kBlockN = S::kBlockN, kThreads = S::kThreads;
  extern __shared__ __align__(16) char shared[];
  const u32 q_tile = ptx::shared_address(shared), operand = q_tile + S::kOperand,
            raw = q_tile + S::kRaw;
  unsigned char* map = reinterpret_cast<unsigned char*>(shared + S::kMap);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane % 4;

  // Late rows first: under a causal mask they have the most tiles.
  const Band& band = params.band;
  const i32 blocks = (band.n_q + S::kBlockM - 1) / S::kBlockM;
  const i32 block = blocks - 1 - static_cast<i32>(blockIdx.x % blocks);
  const i32 first_row = block * S::kBlockM, last_row = min(first_row + S::kBlockM, band.n_q) - 1;
  const float *q, *k, *v;
  {
    const i32 flat_head = blockIdx.x / blocks;
    const i32 batch = flat_head / params.heads, head = flat_head % params.heads;
    q = params.q + params.q_strides.at(batch, head);
    k = params.k + params.k_strides.at(batch, head / params.group);
    v = params.v + params.v_strides.at(batch, head / params.group);
  }

  // Keys that some row of this CTA sees; others are loaded as zeros, whatever they hold.
  const i32 key_low = band.low(first_row), key_high = band.high(last_row);
  const i32 tile_begin = key_low / kBlockN,
            tile_end = key_high > key_low ? (key_high + kBlockN - 1) / kBlockN : 0;

  auto load_k = [&](i32 tile) {
    load_raw<K, kThreads>(raw, k, params.k_strides.row, tile * kBlockN, key_low, key_high,
                          params.d);
    ptx::cp_async_commit();
  };
  auto load_v = [&](i32 tile) {
    load_raw<V, kThreads>(raw, v, params.v_strides.row, tile * kBlockN, key_low, key_high,
                          params.d_v);
    ptx::cp_async_commit();
  };
  // Waits for this thread's pieces, and until all have read the operand before. Once split, the
  // pieces make room.
  auto await = [] {
    ptx::cp_async_wait<0>();
    __syncthreads();
  };
  auto split_k = [&] {
    await();
    split_tile<K, kThreads>(shared + S::kOperand, shared + S::kRaw);
  };
  auto is_masked = [&](i32 tile) {
    const i32 start = tile * kBlockN;
    return band.low(last_row) > start || band.high(first_row) < start + kBlockN;
  };
  // S of a tile whose K is there, capped, -inf where not seen.
  auto scores = [&](Rows<kGroups>& s, i32 tile) {
    product<typename S::Q, K>(s, q_tile, operand);
    if constexpr (kSoftcap) {
#pragma unroll
      for (int i = 0; i < kGroups * 4; ++i) (&s[0][0][0])[i] = capped((&s[0][0][0])[i], params.cap);
    }
    if (!is_masked(tile)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i32 row = first_row + warp * 16 + h * 8 + lane / 4;
      const i32 low = band.low(row) - tile * kBlockN, high = band.high(row) - tile * kBlockN;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const i32 key = j * 8 + g * 2 + e;
          if (key < low || key >= high) s[h][j][e] = negative_infinity();
        }
      }
    }
  };

  RowState state[2];
  Rows<S::kDv / 8> o = {};

  if (tile_end > tile_begin) {
    load_k(tile_end - 1);
    load_terms<typename S::Q, kThreads>(shared, q, params.q_strides.row, first_row, band.n_q,
                                        params.d);
  }

  if constexpr (A::kReference == Reference::kFinal) {
    // A first pass for the exact max of every row.
    for (i32 tile = tile_end - 1; tile >= tile_begin; --tile) {
      split_k();
      load_k(tile > tile_begin ? tile - 1 : tile_end - 1);
      __syncthreads();
      Rows<kGroups> s;
      scores(s, tile);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = negative_infinity();
#pragma unroll
        for (int j = 0; j < kGroups; ++j) top = fmaxf(top, fmaxf(s[h][j][0], s[h][j][1]));
        state[h].r = fmaxf(state[h].r, __fmul_rn(quad_max(top), params.c));
      }
    }
  }

  for (i32 tile = tile_end - 1; tile >= tile_begin; --tile) {
    split_k();
    load_v(tile);
    __syncthreads();
    Rows<kGroups> s;
    scores(s, tile);

    float alpha[2];
    softmax<A>(state, s, alpha, params.c, params.stale_limit);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!A::kPromoted && __any_sync(0xffffffffu, alpha[h] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < S::kDv / 8; ++j) {
          o[h][j][0] = __fmul_rn(o[h][j][0], alpha[h]);
          o[h][j][1] = __fmul_rn(o[h][j][1], alpha[h]);
        }
      }
    }
    Terms<kGroups / 2> p;
    split_rows<kGroups>(p, s);

    await();
    bool found = false;
    if (is_masked(tile)) {
      found = split_clean_tile<V, kThreads>(shared + S::kOperand, shared + S::kRaw, map);
    } else {
      split_tile<V, kThreads>(shared + S::kOperand, shared + S::kRaw);
    }
    if (tile > tile_begin) load_k(tile - 1);
    const bool specials = __syncthreads_or(found);
    if constexpr (A::kPromoted) {
      add_product<V>(o, p, operand, alpha);
    } else {
      accumulate<V>(o, p, operand);
    }
    if (specials) {
      const i32 row = first_row + warp * 16 + lane / 4;
      auto sees = [&](int h, int key) {
        const i32 at = tile * kBlockN + key;
        return at >= band.low(row + h * 8) && at < band.high(row + h * 8);
      };
      mark_nan<V, kThreads>(o, shared + S::kOperand, operand, map, sees);
    }
  }

  // Anew, so that it is not kept in registers through the loop.
  const i32 flat_head = ptx::block_index() / blocks;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i32 row = first_row + warp * 16 + h * 8 + lane / 4;
    const float l = quad_sum(state[h].l);
    if (row >= band.n_q) continue;
    const bool sees = band.high(row) > band.low(row);
    const float inverse = __frcp_rn(l);
    if (g == 0) {
      const float lse =
          __fmul_rn(__fadd_rn(state[h].r, ptx::lg2_approx_ftz(l)), 0.693147182464599609375f);
      params.lse[static_cast<i64>(flat_head) * band.n_q + row] = sees ? lse : negative_infinity();
    }
    float* out =
        params.out + params.out_strides.at(flat_head / params.heads, flat_head % params.heads, row);
#pragma unroll
    for (int j = 0; j < S::kDv / 8; ++j) {
      const int column = j * 8 + g * 2;
      if (column >= params.d_v) continue;
      const float x = sees ? __fmul_rn(o[h][j][0], inverse) : 0.0f;
      const float y = sees ? __fmul_rn(o[h][j][1], inverse) : 0.0f;
      *reinterpret_cast<float2*>(out + column) = make_float2(x, y);
    }
  }
}

}  // namespace cuflash::sm80

// Backward of float32 attention for any GPU since Ampere: the arithmetic of emulation/backward.py.
// One kernel makes each gradient. A CTA holds rows of it (queries for dQ, keys for dK and dV), 16 a
// warp, and walks tiles of the other side. dK and dV each compute P anew: with both in one CTA
// three terms of everything would not fit. No atomics, no order left to the scheduler.
#include "tile/float32.cuh"

namespace cuflash::sm80 {

// -- What a row needs once: delta = rowsum(dO O) - dLSE, and LSE in log2 units

struct DeltaParams {
  const float *dout, *out;
  const float *lse, *dlse;  // (batch, heads, n_q); dlse may be null
  float *lse2, *delta;      // (batch, heads, pitch), zeros behind n_q
  Strides dout_strides, out_strides;
  i32 batch, heads, n_q, d_v, pitch;
};

constexpr int kDeltaThreads = 256;

// A thread sums a chunk of eight columns; the chunks, kChunks rounded up to a power of two, are
// joined by halves.
template <int kChunks>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_float32(const __grid_constant__ DeltaParams params) {
  const i64 flat_row =
      static_cast<i64>(blockIdx.x) * (kDeltaThreads / kChunks) + threadIdx.x / kChunks;
  const i64 flat_head = flat_row / params.pitch;
  const i32 row = static_cast<i32>(flat_row % params.pitch);
  const i32 batch = static_cast<i32>(flat_head / params.heads);
  const i32 head = static_cast<i32>(flat_head % params.heads);
  const int column = threadIdx.x % kChunks * 8;
  const bool exists = batch < params.batch && row < params.n_q;

  float sum = 0.0f;
  if (exists && column < params.d_v) {
    const float* dout = params.dout + params.dout_strides.at(batch, head, row) + column;
    const float* out = params.out + params.out_strides.at(batch, head, row) + column;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = __fmaf_rn(dout[e], out[e], sum);
  }
#pragma unroll
  for (int step = kChunks / 2; step > 0; step /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
  }

  if (column != 0 || batch >= params.batch) return;
  float lse2 = 0.0f;
  if (exists) {
    const i64 at = flat_head * params.n_q + row;
    if (params.dlse != nullptr) sum = __fsub_rn(sum, params.dlse[at]);
    const float lse = params.lse[at];
    // A row that sees nothing has LSE -inf; its P is masked, whatever stands here.
    if (lse != __int_as_float(0xff800000)) lse2 = __fmul_rn(lse, 1.44269502162933349609375f);
  }
  params.delta[flat_row] = sum;
  params.lse2[flat_row] = lse2;
}

// -- One gradient

enum class Gradient { kQueries, kKeys, kValues };

struct GradientParams {
  const float *q, *k, *v, *dout;
  float *dq, *dk, *dv;
  const float *lse2, *delta;
  Strides q_strides, k_strides, v_strides, dout_strides, dq_strides, dk_strides, dv_strides;
  Band band;
  i32 heads, group;  // query heads, query heads per key head
  i32 d, d_v;
  i32 pitch;
  i32 tile_n;      // of the Plan
  i32 descending;  // order in which the key tiles are added to dQ
  float c;         // a score times c is in log2 units
  float cap;       // softcap: a score times cap is the argument of tanh
  float scale;     // of dQ and dK
};

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// kRows: of the gradient in a CTA. kTile: of the other side at a time, tile_n or tile_m of the
// Plan. In a tile the operand is first `First`, then `Second`, which is also what P or dS
// multiplies.
template <Gradient kWhat_, int kD_, int kDv_, int kRows_, int kTile_>
struct GradientShape {
  static constexpr Gradient kWhat = kWhat_;
  static constexpr int kD = kD_, kDv = kDv_, kRows = kRows_, kTile = kTile_;
  static constexpr bool kValues = kWhat == Gradient::kValues;
  static constexpr int kThreads = kRows * 2;
  static constexpr int kGroups = kTile / 8;
  using Own = Tile<kRows, kD>;         // Q or K
  using OwnWeight = Tile<kRows, kDv>;  // dO or V, for dP
  using First = Tile<kTile, kValues ? kD : kDv>;
  using Second = Tile<kTile, kValues ? kDv : kD>;
  static constexpr int kOwnWeight = 3 * Own::kBytes;
  static constexpr int kOperand = kOwnWeight + (kValues ? 0 : 3 * OwnWeight::kBytes);
  static constexpr int kRaw = kOperand + 3 * larger(First::kBytes, Second::kBytes);
  static constexpr int kMap = kRaw + larger(Raw<First>::kBytes, Raw<Second>::kBytes);
};

template <class S, class A, bool kSoftcap>
__global__ void __launch_bounds__(S::kThreads, 1)
    gradient_float32(const __grid_constant__ GradientParams params) {
  using First = typename S::First;
  using Second = typename S::Second;
  constexpr bool kQueries = S::kWhat == Gradient::kQueries, kValues = S::kValues;
  constexpr int kRows = S::kRows, kTile = S::kTile, kThreads = S::kThreads, kGroups = S::kGroups;
  extern __shared__ __align__(16) char shared[];
  const u32 own = ptx::shared_address(shared);
  const u32 operand = own + S::kOperand, raw = own + S::kRaw;
  unsigned char* map = reinterpret_cast<unsigned char*>(shared + S::kMap);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane % 4;

  // The band as seen from the rows of this gradient: which of the other side they meet.
  const Band& given = params.band;
  const Band band =
      kQueries ? given : Band{given.n_k, given.n_q, -given.diagonal, given.right, given.left};
  const i32 blocks = (band.n_q + kRows - 1) / kRows;
  const i32 at = static_cast<i32>(blockIdx.x % blocks);
  // The longest first, under a causal mask: late queries, early keys.
  const i32 first_row = (kQueries ? blocks - 1 - at : at) * kRows;
  const i32 last_row = min(first_row + kRows, band.n_q) - 1;
  const i32 own_heads = kQueries ? params.heads : params.heads / params.group;
  const i32 flat_head = blockIdx.x / blocks;
  const i32 batch = flat_head / own_heads, head = flat_head % own_heads;

  // What some row of this CTA meets; the rest is loaded as zeros, whatever it holds.
  const i32 low = band.low(first_row), high = band.high(last_row);
  const i32 tile_begin = low / kTile;
  const i32 tiles = high > low ? (high + kTile - 1) / kTile - tile_begin : 0;
  const i32 steps = kQueries ? tiles : tiles * params.group;
  auto other_head_of = [&](i32 step) {
    return kQueries ? head / params.group : head * params.group + step / tiles;
  };
  auto start_of = [&](i32 step) {
    const i32 tile = kQueries ? step : step % tiles;
    return (kQueries && params.descending ? tile_begin + tiles - 1 - tile : tile_begin + tile) *
           kTile;
  };
  auto other = [&](const float* from, const Strides& strides, i32 step) {
    return from + strides.at(batch, other_head_of(step));
  };
  auto load_first = [&](i32 step) {
    const float* from = kQueries  ? other(params.v, params.v_strides, step)
                        : kValues ? other(params.q, params.q_strides, step)
                                  : other(params.dout, params.dout_strides, step);
    const i64 row = kQueries  ? params.v_strides.row
                    : kValues ? params.q_strides.row
                              : params.dout_strides.row;
    const i32 columns = kValues ? params.d : params.d_v;
    load_raw<First, kThreads>(raw, from, row, start_of(step), low, high, columns);
    ptx::cp_async_commit();
  };
  auto load_second = [&](i32 step) {
    const float* from = kQueries  ? other(params.k, params.k_strides, step)
                        : kValues ? other(params.dout, params.dout_strides, step)
                                  : other(params.q, params.q_strides, step);
    const i64 row = kQueries  ? params.k_strides.row
                    : kValues ? params.dout_strides.row
                              : params.q_strides.row;
    const i32 columns = kValues ? params.d_v : params.d;
    load_raw<Second, kThreads>(raw, from, row, start_of(step), low, high, columns);
    ptx::cp_async_commit();
  };
  // Waits for this thread's pieces, and until all have read the operand before. Once split, the
  // pieces make room.
  auto await = [] {
    ptx::cp_async_wait<0>();
    __syncthreads();
  };

  const i32 own_row = first_row + warp * 16 + lane / 4;
  const auto row_at = [&](i32 query_head) {
    return (static_cast<i64>(batch) * params.heads + query_head) * params.pitch;
  };
  // Of this thread's two queries (dQ), or of two neighbouring ones of a tile.
  auto of_queries = [&](float (&x)[2], const float* from, i32 step, int h, int j) {
    if constexpr (kQueries) {
      x[0] = x[1] = __ldg(from + row_at(head) + own_row + h * 8);
    } else {
      const i64 first = row_at(other_head_of(step)) + start_of(step) + j * 8 + g * 2;
      const float2 pair = __ldg(reinterpret_cast<const float2*>(from + first));
      x[0] = pair.x;
      x[1] = pair.y;
    }
  };
  // S in, P out; the capped S stays in `t`, for its slope.
  auto probabilities = [&](Rows<kGroups>& p, Rows<kSoftcap ? kGroups : 1>& t, i32 step,
                           bool masked) {
    const i32 start = start_of(step);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i32 from = band.low(own_row + h * 8) - start, to = band.high(own_row + h * 8) - start;
      // Column groups count from the start of the Plan's tile of keys.
      const int key_group = (first_row + warp * 16 + h * 8) % params.tile_n / 8;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        float lse2[2];
        of_queries(lse2, params.lse2, step, h, j);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = p[h][j][e];
          if constexpr (kSoftcap) x = t[h][j][e] = capped(x, params.cap);
          x = exp2_of<A::kExp2>(__fmaf_rn(x, params.c, -lse2[e]), kQueries ? j : key_group);
          const i32 column = j * 8 + g * 2 + e;
          if (masked && (column < from || column >= to)) x = 0.0f;
        }
      }
    }
  };

  Rows<Second::kCols / 8> sum = {};
  const float one[2] = {1.0f, 1.0f};

  if (steps > 0) {
    load_first(0);
    const i32 end = band.n_q;
    if constexpr (kQueries) {
      load_terms<typename S::Own, kThreads>(shared, params.q + params.q_strides.at(batch, head),
                                            params.q_strides.row, first_row, end, params.d);
      load_terms<typename S::OwnWeight, kThreads>(
          shared + S::kOwnWeight, params.dout + params.dout_strides.at(batch, head),
          params.dout_strides.row, first_row, end, params.d_v);
    } else {
      load_terms<typename S::Own, kThreads>(shared, params.k + params.k_strides.at(batch, head),
                                            params.k_strides.row, first_row, end, params.d);
      if constexpr (!kValues) {
        load_terms<typename S::OwnWeight, kThreads>(
            shared + S::kOwnWeight, params.v + params.v_strides.at(batch, head),
            params.v_strides.row, first_row, end, params.d_v);
      }
    }
  }

  for (i32 step = 0; step < steps; ++step) {
    const i32 start = start_of(step);
    const bool masked = band.low(last_row) > start || band.high(first_row) < start + kTile;
    await();
    split_tile<First, kThreads>(shared + S::kOperand, shared + S::kRaw);
    load_second(step);
    __syncthreads();

    Rows<kGroups> p, dp;
    Rows<kSoftcap ? kGroups : 1> t;
    Terms<kGroups / 2> a;
    if constexpr (kValues) {
      product<typename S::Own, First, true>(p, own, operand);
      probabilities(p, t, step, masked);
      split_rows<kGroups>(a, p);
    } else {
      product<typename S::OwnWeight, First, !kQueries>(dp, own + S::kOwnWeight, operand);
    }

    await();
    bool found = false;
    if (!masked) {
      split_tile<Second, kThreads>(shared + S::kOperand, shared + S::kRaw);
    } else if constexpr (kValues) {
      found = split_clean_tile<Second, kThreads>(shared + S::kOperand, shared + S::kRaw, map);
    } else {
      found = split_tile<Second, kThreads, true>(shared + S::kOperand, shared + S::kRaw);
    }
    if (step + 1 < steps) load_first(step + 1);
    const bool specials = __syncthreads_or(found);

    if constexpr (!kValues) {
      product<typename S::Own, Second, !kQueries>(p, own, operand);
      probabilities(p, t, step, masked);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i32 from = band.low(own_row + h * 8) - start, to = band.high(own_row + h * 8) - start;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          float delta[2];
          of_queries(delta, params.delta, step, h, j);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& ds = dp[h][j][e];
            ds = __fmul_rn(p[h][j][e], __fsub_rn(ds, delta[e]));
            if constexpr (kSoftcap) {
              ds = __fmul_rn(ds, __fmaf_rn(-t[h][j][e], t[h][j][e], 1.0f));
            }
            const i32 column = j * 8 + g * 2 + e;
            if (masked && (column < from || column >= to)) ds = 0.0f;
          }
        }
      }
      split_rows<kGroups>(a, dp);
      // Rows that see a special value have NaN in dS already.
      if (specials) clean_terms<Second, kThreads>(shared + S::kOperand);
    }
    if constexpr (kQueries || A::kPromoted) {
      add_product<Second>(sum, a, operand, one);
    } else {
      accumulate<Second>(sum, a, operand);
    }
    if constexpr (kValues) {
      if (specials) {
        auto sees = [&](int h, int column) {
          const i32 row = own_row + h * 8, query = start + column;
          return query >= band.low(row) && query < band.high(row);
        };
        mark_nan<Second, kThreads>(sum, shared + S::kOperand, operand, map, sees);
      }
    }
  }

  // Anew, so that it is not kept in registers through the loop.
  const i32 flat = ptx::block_index() / blocks;
  float* to = kQueries ? params.dq : kValues ? params.dv : params.dk;
  const Strides& strides = kQueries  ? params.dq_strides
                           : kValues ? params.dv_strides
                                     : params.dk_strides;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i32 row = own_row + h * 8;
    if (row >= band.n_q) continue;
    float* gradient = to + strides.at(flat / own_heads, flat % own_heads, row) + g * 2;
#pragma unroll
    for (int j = 0; j < Second::kCols / 8; ++j) {
      if (j * 8 >= (kValues ? params.d_v : params.d)) continue;
      const float x = sum[h][j][0], y = sum[h][j][1];
      *reinterpret_cast<float2*>(gradient + j * 8) =
          kValues ? make_float2(x, y)
                  : make_float2(__fmul_rn(x, params.scale), __fmul_rn(y, params.scale));
    }
  }
}

}  // namespace cuflash::sm80

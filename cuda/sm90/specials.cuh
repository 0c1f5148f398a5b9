// NaN and Inf behind a mask in the Hopper backward: 0 * NaN would carry them into rows and keys
// that do not see them. Of K they are taken out of shared memory once a tile, of Q and dO in each
// step whose block a mask cuts, after S and dP have had them; whoever does see them gets them out
// of global memory. All of this is rare, and as short as it can be. Who looks, looks at a whole
// tile: where both warpgroups do, they decide the same.
#pragma once

#include "sm90/gradient.cuh"

namespace cuflash::sm90 {

// Whether this thread's share of a tile holds NaN or Inf: an exponent of all ones carries into the
// sign's place.
template <class Half, int kBytes, int kThreads>
__device__ __forceinline__ bool finds_nonfinite(const char* tile, int thread) {
  constexpr u32 kExponents = Half::kExponent << 16 | Half::kExponent;
  constexpr u32 kOneMore = (Half::kExponent & (0u - Half::kExponent)) * 0x10001u;
  u32 carries = 0;
#pragma unroll 2
  for (int i = thread; i < kBytes / 16; i += kThreads) {
    const uint4 x = reinterpret_cast<const uint4*>(tile)[i];
    carries |= ((x.x & kExponents) + kOneMore) | ((x.y & kExponents) + kOneMore);
    carries |= ((x.z & kExponents) + kOneMore) | ((x.w & kExponents) + kOneMore);
  }
  return (carries & 0x80008000u) != 0;
}

template <class Half>
__device__ __forceinline__ bool is_special(u16 x) {
  return (x & Half::kExponent) == Half::kExponent;
}

// Whether one of kRows rows may have some, by their LSE and delta, in shared or global memory: NaN
// or Inf in Q leaves no finite LSE, in dO no finite delta. (LSE of -Inf is here as -0. A softcap
// hides what is in Q: there one has to look.) By a whole warp.
template <int kRows>
__device__ __forceinline__ bool may_be_in_rows(const float* lse2, const float* delta) {
  constexpr u32 kInf = 0x7f800000u;
  bool some = false;
#pragma unroll
  for (int i = ptx::thread_index() % 32; i < kRows; i += 32) {
    const u32 l = __float_as_uint(lse2[i]), d = __float_as_uint(delta[i]);
    some |= (l & kInf) == kInf || (d & kInf) == kInf || l == 0x80000000u;
  }
  return __any_sync(kWholeWarp, some);
}

template <class S>
struct Specials {
  using Half = typename S::Half;
  using DS = typename S::DS;
  using P = Piece<S::kBlockM, S::kBlockN>;
  const BackwardParams& params;
  char* const shared;
  const int mine;        // warpgroup
  bool in_keys = false;  // K has some, and is clean now

  __device__ __forceinline__ Specials(const BackwardParams& params, char* shared, int mine)
      : params(params), shared(shared), mine(mine) {}

  // Of the warpgroup; asked for anew, so that nothing is kept for what is rare.
  __device__ __forceinline__ static int thread() { return ptx::thread_index() % 128; }

  __device__ __forceinline__ bool agree(bool found) const {
    return __any_sync(kWholeWarp, ptx::bar_red_or(kWarpgroup + mine, 128, found));
  }

  // When K has arrived; a warpgroup looks at all of it.
  __device__ __forceinline__ void look_at_keys() {
    in_keys = agree(finds_nonfinite<Half, S::K::kBytes, 128>(shared + S::kK, thread()));
  }
  // If it has some, when both have looked and no product needs them any more.
  __device__ __forceinline__ void clear_keys() const {
    ptx::bar_sync(kBoth, kConsumers);
    clear_nonfinite<Half, S::K::kBytes, kConsumers>(shared + S::kK, mine * 128 + thread());
    ptx::fence_proxy_async();
    ptx::bar_sync(kBoth, kConsumers);
  }

  // Whether Q or dO of a stage has some.
  template <bool kSoftcap>
  __device__ __forceinline__ bool in_rows(u32 stage) const {
    const float* const lse2 = reinterpret_cast<const float*>(shared + S::kLse) + stage * S::kBlockM;
    const float* const delta =
        reinterpret_cast<const float*>(shared + S::kDelta) + stage * S::kBlockM;
    if (!kSoftcap && !may_be_in_rows<S::kBlockM>(lse2, delta)) return false;
    const char *q = shared + S::kQ + stage * S::Q::kBytes,
               *dout = shared + S::kDO + stage * S::DO::kBytes;
    return agree(finds_nonfinite<Half, S::Q::kBytes, 128>(q, thread()) ||
                 finds_nonfinite<Half, S::DO::kBytes, 128>(dout, thread()));
  }
  // When S and dP of the stage are there: by both warpgroups if they make them together, else by
  // the one that does.
  __device__ __forceinline__ void clear_rows(u32 stage) const {
    constexpr int kAll = S::kTogether ? kConsumers : 128;
    const u32 barrier = S::kTogether ? kBoth : kWarpgroup + mine;
    const int i = S::kTogether ? mine * 128 + thread() : thread();
    ptx::bar_sync(barrier, kAll);
    clear_nonfinite<Half, S::Q::kBytes, kAll>(shared + S::kQ + stage * S::Q::kBytes, i);
    clear_nonfinite<Half, S::DO::kBytes, kAll>(shared + S::kDO + stage * S::DO::kBytes, i);
    ptx::fence_proxy_async();
    ptx::bar_sync(barrier, kAll);
  }

  // What the keys' specials do to S: columns are queries of the block.
  template <int kGroups>
  __device__ __forceinline__ void add_to_scores(Accumulator<kGroups>& s, const P& piece,
                                                const Walk& walk, int first_key) const {
    const int lane = ptx::thread_index() % 32;
    const i32 row = walk.block * S::kBlockM + lane % 4 * 2;
    const i32 key = piece.first_key + first_key + ptx::thread_index() % 128 / 32 * 16 + lane / 4;
    one_by_one(s, [&](float sum, int h, int column) {
      const i32 r = row + column, k_row = key + 8 * h;
      if (r >= params.band.n_q || k_row >= params.band.n_k) return sum;
      const u16* q = params.q + params.q_strides.at(piece.batch, walk.head, r);
      const u16* k = params.k + params.k_strides.at(piece.batch, piece.kv_head, k_row);
#pragma unroll 1
      for (int i = 0; i < params.d; ++i) {
        if (is_special<Half>(k[i]))
          sum = __fadd_rn(sum, __fmul_rn(Half::widen(q[i]), Half::widen(k[i])));
      }
      return sum;
    });
  }

  // What specials of rows of dO do to dV, or of Q to dK: their weights are halves of P or dS, just
  // written. first_key: the first of the accumulators in the tile.
  template <int kGroups>
  __device__ __forceinline__ void add_rows_of(Accumulator<kGroups>& acc, const P& piece,
                                              const char* weights, const Walk& walk, int first_key,
                                              bool of_dout) const {
    const Strides& strides = of_dout ? params.dout_strides : params.q_strides;
    const u16* const rows = (of_dout ? params.dout : params.q) + strides.at(piece.batch, walk.head);
    const i64 row_stride = strides.row;
    const int columns = of_dout ? params.d_v : params.d;
    const int lane = ptx::thread_index() % 32;
    const i32 first_row = walk.block * S::kBlockM;
    const int key = first_key + ptx::thread_index() % 128 / 32 * 16 + lane / 4;
    one_by_one(acc, [&](float sum, int h, int column) {
      column += lane % 4 * 2;
      if (column >= columns) return sum;
      return weighted(sum, weights, rows + first_row * row_stride + column, row_stride,
                      RowsOfKey{params.band, first_row, piece.first_key}(key + 8 * h),
                      min(S::kBlockM, params.band.n_q - first_row), key + 8 * h, true);
    });
  }

  // What the keys' specials do to a share of dQ: rows are columns of the head from `first_column`,
  // columns queries from `first_query` of the block.
  template <int kGroups>
  __device__ __forceinline__ void add_keys(Accumulator<kGroups>& dq, const P& piece,
                                           const char* weights, i32 block, int first_column,
                                           int first_query) const {
    const int lane = ptx::thread_index() % 32;
    const int first = first_column + ptx::thread_index() % 128 / 32 * 16 + lane / 4;
    one_by_one(dq, [&](float sum, int h, int query) {
      const int column = first + 8 * h;
      query += first_query + lane % 4 * 2;
      if (column >= params.d) return sum;
      const u16* k = params.k + params.k_strides.at(piece.batch, piece.kv_head, piece.first_key);
      return weighted(sum, weights, k + column, params.k_strides.row,
                      KeysOfRow{params.band, block * S::kBlockM, piece.first_key}(query),
                      min(S::kBlockN, params.band.n_k - piece.first_key), query, false);
    });
  }

  // sum + the specials of a column times their weights: by row of the weights, or along one.
  __device__ __forceinline__ float weighted(float sum, const char* weights, const u16* column,
                                            i64 stride, Range seen, int end, int fixed,
                                            bool by_row) const {
#pragma unroll 1
    for (int i = max(seen.low, 0); i < min(seen.high, end); ++i) {
      const u16 value = column[i * stride];
      if (!is_special<Half>(value)) continue;
      const int query = by_row ? i : fixed, key = by_row ? fixed : i;
      const u16 weight =
          *reinterpret_cast<const u16*>(weights + DS::chunk(query, key) + key % 8 * 2);
      sum = __fadd_rn(sum, __fmul_rn(Half::widen(weight), Half::widen(value)));
    }
    return sum;
  }

  // Accumulators take turns in one register, so that this rare code is short. add(x, h, column).
  template <int kGroups, class Add>
  __device__ __forceinline__ void one_by_one(Accumulator<kGroups>& acc, const Add& add) const {
    constexpr int kCount = 4 * kGroups;
    float* const x = &acc[0][0][0];
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      const float sum = add(x[0], i / (2 * kGroups), i / 2 % kGroups * 8 + i % 2);
#pragma unroll
      for (int j = 0; j + 1 < kCount; ++j) x[j] = x[j + 1];
      x[kCount - 1] = sum;
    }
  }
};

}  // namespace cuflash::sm90

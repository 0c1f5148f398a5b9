// What the backward is made of: its parameters, products of warps that share a block, masks, and
// what NaN and Inf behind a mask need. The arithmetic is that of emulation/backward.py.
#pragma once

#include "ptx/memory.cuh"
#include "tile/band.cuh"
#include "tile/layout.cuh"
#include "tile/nonfinite.cuh"
#include "tile/numerics.cuh"

namespace cuflash {

struct GradientParams {
  const u16 *q, *k, *v, *dout;
  void *dq, *dk, *dv;
  const float *lse2, *delta;  // (batch, heads, pitch): LSE log2(e), and rowsum(dO O) - dLSE
  float* sums;                // (batch * heads, blocks, kBlockM * kD): dQ so far, as in registers
  i32* turns;           // (batch * heads, blocks): key tiles that have been added; zeros at first
  i32* tickets;         // CTAs that have started; 0 at first
  float* row_sums;      // (batch * heads, blocks, kBlockM): of dS so far; where dQ is centred
  const float* dlse;    // (batch * heads, n_q), or null
  const u32* centered;  // (batch * key heads, pitch / 32): a bit for each row; null without center
  Strides q_strides, k_strides, v_strides, dout_strides, dq_strides, dk_strides, dv_strides;
  Band band;
  i32 heads, group;  // query heads, query heads per key head
  i32 d, d_v;
  i32 pitch;       // n_q rounded up to a multiple of 128
  i32 tile_n;      // of the Plan
  i32 descending;  // order in which the key tiles are added to dQ
  float c;         // a score times c is in log2 units
  float cap;       // softcap: a score times cap is the argument of tanh
  float scale;     // of dQ and dK
  i32 interleave;  // heads whose tickets alternate
  i32 center;      // of the Plan
};

// How warps share a block of kM x kN accumulators: kRows x kColumns of them, each with kMi m16
// blocks by kNj n8 blocks. Of all ways that keep the most warps busy, the one that reads least from
// shared memory.
template <int kM, int kN, int kWarps>
struct WarpGrid {
  __host__ __device__ static constexpr int cost(int rows, int columns) {
    if (kM % (16 * rows) != 0 || kN % (16 * columns) != 0 || rows * columns > kWarps)
      return 1 << 30;
    return ((kWarps - rows * columns) << 20) + kM / 16 / rows + kN / 16 / columns;
  }
  __host__ __device__ static constexpr int best() {
    int found = 0;
    for (int i = 0; i < 16; ++i)
      if (cost(1 << i / 4, 1 << i % 4) < cost(1 << found / 4, 1 << found % 4)) found = i;
    return found;
  }
  static constexpr int kRows = 1 << best() / 4, kColumns = 1 << best() % 4;
  static constexpr int kMi = kM / 16 / kRows, kNj = kN / 8 / kColumns;
  static_assert(cost(kRows, kColumns) < 1 << 30, "sides are multiples of 16");

  // The first row and column of this warp; warps past kRows * kColumns have nothing to do.
  __device__ __forceinline__ static bool busy() {
    return kRows * kColumns == kWarps || threadIdx.x / 32 < kRows * kColumns;
  }
  __device__ __forceinline__ static int row() {
    return static_cast<int>(threadIdx.x / 32 / kColumns) * kMi * 16;
  }
  __device__ __forceinline__ static int column() {
    return static_cast<int>(threadIdx.x / 32 % kColumns) * kNj * 8;
  }
};

// A warp's accumulators: rows mi * 16 + h * 8 + lane / 4, columns j * 8 + lane % 4 * 2 + e.
template <int kMi, int kNj>
using Block = float[kMi][2][kNj][2];

template <int kMi, int kNj>
__device__ __forceinline__ void clear(Block<kMi, kNj>& x) {
#pragma unroll
  for (int i = 0; i < kMi * 2 * kNj * 2; ++i) (&x[0][0][0][0])[i] = 0.0f;
}

// acc += A B through the tensor core, kSteps steps of k16 in ascending order. load_a(a, mi, step)
// and load_b(b, pair, step) fetch the operands of an m16 block and of two n8 blocks, one step ahead
// of the products that use them.
template <class Half, int kSteps, int kMi, int kNj, class LoadA, class LoadB>
__device__ __forceinline__ void accumulate(Block<kMi, kNj>& acc, const LoadA& load_a,
                                           const LoadB& load_b) {
  constexpr int kPairs = kNj / 2, kCount = kSteps * kPairs;
  u32 a[2][kMi][4], b[2][4];
  auto fetch = [&](int i) {
    const int step = i / kPairs;
    if (i % kPairs == 0) {
#pragma unroll
      for (int mi = 0; mi < kMi; ++mi) load_a(a[step % 2][mi], mi, step);
    }
    load_b(b[i % 2], i % kPairs, step);
  };
  fetch(0);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i + 1 < kCount) fetch(i + 1);
    const int step = i / kPairs, j = i % kPairs * 2;
#pragma unroll
    for (int mi = 0; mi < kMi; ++mi) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Half::mma(acc[mi][0][j + h][0], acc[mi][0][j + h][1], acc[mi][1][j + h][0],
                  acc[mi][1][j + h][1], a[step % 2][mi], b[i % 2][2 * h], b[i % 2][2 * h + 1]);
      }
    }
  }
}

// The same with the product from zero and added in fp32.
template <class Half, int kSteps, int kMi, int kNj, class LoadA, class LoadB>
__device__ __forceinline__ void add_product(Block<kMi, kNj>& acc, const LoadA& load_a,
                                            const LoadB& load_b) {
#pragma unroll
  for (int pair = 0; pair < kNj / 2; ++pair) {
    Block<kMi, 2> d = {};
    accumulate<Half, kSteps>(d, load_a, [&](u32(&b)[4], int, int step) { load_b(b, pair, step); });
#pragma unroll
    for (int i = 0; i < kMi * 8; ++i) {
      float& sum = acc[i / 8][i / 4 % 2][pair * 2 + i / 2 % 2][i % 2];
      sum = __fadd_rn(sum, d[i / 8][i / 4 % 2][i / 2 % 2][i % 2]);
    }
  }
}

// The rows [low, high) of B's tile that a row of A's tile sees.
struct Range {
  i32 low, high;

  __device__ __forceinline__ bool holds(int k) const { return k >= low && k < high; }
};

// A holds rows of queries, B keys.
struct KeysOfRow {
  const Band& band;
  i32 first_row, first_key;

  __device__ __forceinline__ Range operator()(int m) const {
    const i32 row = first_row + m;
    if (row >= band.n_q) return {0, 0};
    return {band.low(row) - first_key, band.high(row) - first_key};
  }
};

// A holds keys, B rows of queries: the band, turned around.
struct RowsOfKey {
  const Band& band;
  i32 first_row, first_key;

  __device__ __forceinline__ Range operator()(int m) const {
    const i32 key = first_key + m;
    if (key >= band.n_k) return {0, 0};
    return {row_of(static_cast<i64>(key) - band.right) - first_row,
            row_of(static_cast<i64>(key) + band.left + 1) - first_row};
  }
  // The row whose diagonal is at `key`, or the nearest of 0 and n_q.
  __device__ __forceinline__ i32 row_of(i64 key) const {
    const i64 row = key - band.diagonal;
    return row > 0 ? (row < band.n_q ? static_cast<i32>(row) : band.n_q) : 0;
  }
};

// Zeros where not seen, in a warp's P and dS that begin at (row, column) of a tile.
template <int kMi, int kNj, class Sees>
__device__ __forceinline__ void clear_unseen(Block<kMi, kNj>& p, Block<kMi, kNj>& ds, int row,
                                             int column, const Sees& seen) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMi * 2; ++i) {
    const Range range = seen(row + i * 8 + lane / 4);
    const int first = column + lane % 4 * 2 - range.low, count = max(range.high - range.low, 0);
#pragma unroll
    for (int j = 0; j < kNj * 2; ++j) {
      const bool sees = static_cast<u32>(first + j / 2 * 8 + j % 2) < static_cast<u32>(count);
      p[i / 2][i % 2][j / 2][j % 2] = sees ? p[i / 2][i % 2][j / 2][j % 2] : 0.0f;
      ds[i / 2][i % 2][j / 2][j % 2] = sees ? ds[i / 2][i % 2][j / 2][j % 2] : 0.0f;
    }
  }
}

// A warp's accumulators rounded to halves, into tile T of shared memory, this lane's first at `to`;
// behind it a tile of what that left.
template <class Half, class T, int kParts, int kMi, int kNj>
__device__ __forceinline__ void store_halves(char* to, const Block<kMi, kNj>& x) {
#pragma unroll
  for (int i = 0; i < kMi * 2; ++i) {
#pragma unroll
    for (int j = 0; j < kNj; ++j) {
      const float low = x[i / 2][i % 2][j][0], high = x[i / 2][i % 2][j][1];
      u32* pair = reinterpret_cast<u32*>(to + i * 8 * T::kPitch + j * 16);
      const u32 packed = Half::pack(low, high);
      *pair = packed;
      if constexpr (kParts == 2) pair[T::kBytes / 4] = pack_rest<Half>(low, high, packed);
    }
  }
}

// Weights A[m][k] in shared memory, in halves: their parts, and bytes from one m and k to the next.
struct Weights {
  const char* at;
  int part, m, k;
};

// What `zero_nonfinite` took out of B before A B was added to acc, for those rows of A that see it:
// as the product would be. b: B in global memory, `columns` of its `depth` rows. Accumulators take
// turns in one register, so that this rare code is short.
template <class Half, int kParts, int kMi, int kNj, class Sees>
__device__ __forceinline__ void add_specials(Block<kMi, kNj>& acc, const Weights& weights,
                                             const u16* b, i64 row_stride, int depth, int columns,
                                             int row, int column, const Sees& seen) {
  constexpr int kCount = kMi * 2 * kNj * 2;
  const int lane = threadIdx.x % 32;
  float* const x = &acc[0][0][0][0];
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    const int m = row + i / 2 / kNj * 8 + lane / 4;
    const int n = column + i / 2 % kNj * 8 + lane % 4 * 2 + i % 2;
    const Range range = n < columns ? seen(m) : Range{0, 0};
    float sum = x[0];
#pragma unroll 1
    for (int k = max(range.low, 0); k < min(range.high, depth); ++k) {
      const u16 value = b[k * row_stride + n];
      if ((value & Half::kExponent) != Half::kExponent) continue;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const char* at = weights.at + part * weights.part + m * weights.m + k * weights.k;
        const float weight = Half::widen(*reinterpret_cast<const u16*>(at));
        sum = __fadd_rn(sum, __fmul_rn(weight, Half::widen(value)));
      }
    }
#pragma unroll
    for (int j = 0; j + 1 < kCount; ++j) x[j] = x[j + 1];
    x[kCount - 1] = sum;
  }
}

// P of a score: 2^(s c - LSE), and dS of P: P (dP - delta), times the slope of the softcap.
template <class A>
__device__ __forceinline__ float probability(float s, float c, float lse2, int group) {
  return exp2_of<A::kExp2>(__fmaf_rn(s, c, -lse2), group);
}

template <bool kSoftcap>
__device__ __forceinline__ float score_gradient(float p, float dp, float delta, float s) {
  const float ds = __fmul_rn(p, __fsub_rn(dp, delta));
  return kSoftcap ? __fmul_rn(ds, __fmaf_rn(-s, s, 1.0f)) : ds;
}

template <class Half, bool kFloatOut>
__device__ __forceinline__ void store_pair(void* to, i64 at, float x, float y) {
  if constexpr (kFloatOut) {
    *reinterpret_cast<float2*>(static_cast<float*>(to) + at) = make_float2(x, y);
  } else {
    *reinterpret_cast<u32*>(static_cast<u16*>(to) + at) = Half::pack(x, y);
  }
}

}  // namespace cuflash

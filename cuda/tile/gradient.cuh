// What the backward kernels share: their parameters, and products whose A operand comes out of
// accumulators. The arithmetic is that of emulation/backward.py.
#pragma once

#include "tile/band.cuh"
#include "tile/layout.cuh"
#include "tile/nonfinite.cuh"
#include "tile/numerics.cuh"

namespace cuflash {

struct GradientParams {
  const u16 *q, *k, *v, *dout;
  void *dq, *dk, *dv;
  const float *lse2, *delta;  // (batch, heads, pitch): LSE log2(e), and rowsum(dO O) - dLSE
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
};

constexpr int kThreads = 128;

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Rows mi * 64 + warp * 16 + h * 8 + lane / 4 and columns j * 8 + lane % 4 * 2 + e of a block of
// accumulators.
template <int kMmaRows, int kGroups>
using Block = float[kMmaRows][2][kGroups][2];

// d = A B^T from zero: this warp's rows of A, rows [first, first + kGroups * 8) of B.
template <class Half, class TA, class TB, int kMmaRows, int kGroups>
__device__ __forceinline__ void product(Block<kMmaRows, kGroups>& d, u32 a_tile, u32 b_tile,
                                        int first) {
  static_assert(TA::kCols == TB::kCols, "A and B share the axis that is summed");
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kMmaRows * 2 * kGroups * 2; ++i) (&d[0][0][0][0])[i] = 0.0f;
#pragma unroll
  for (int kk = 0; kk < TA::kCols; kk += 16) {
    u32 a[kMmaRows][4];
#pragma unroll
    for (int mi = 0; mi < kMmaRows; ++mi)
      ptx::ldmatrix_x4(a[mi], a_address<TA>(a_tile, mi * 64 + warp * 16, kk));
#pragma unroll
    for (int j = 0; j < kGroups; j += 2) {
      u32 b[4];
      ptx::ldmatrix_x4(b, b_address<TB>(b_tile, first + j * 8, kk));
#pragma unroll
      for (int mi = 0; mi < kMmaRows; ++mi) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Half::mma(d[mi][0][j + h][0], d[mi][0][j + h][1], d[mi][1][j + h][0], d[mi][1][j + h][1],
                    a[mi], b[2 * h], b[2 * h + 1]);
        }
      }
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
    return {band.low(first_row + m) - first_key, band.high(first_row + m) - first_key};
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

// Zeros where not seen: rows m and columns k of a block of P or dS.
template <int kMmaRows, int kGroups, class Sees>
__device__ __forceinline__ void clear_unseen(Block<kMmaRows, kGroups>& x, const Sees& seen) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMmaRows * 2; ++i) {
    const int mi = i / 2, h = i % 2;
    const Range range = seen(mi * 64 + warp * 16 + h * 8 + lane / 4);
#pragma unroll
    for (int j = 0; j < kGroups * 2; ++j) {
      if (!range.holds(j / 2 * 8 + lane % 4 * 2 + j % 2)) x[mi][h][j / 2][j % 2] = 0.0f;
    }
  }
}

// A operands made of accumulators, whose layout is the same: part 0 rounded to halves, part 1 what
// that left.
template <int kMmaRows, int kParts, int kSteps>
using Operand = u32[kMmaRows][kParts][kSteps][4];

template <class Half, int kParts, int kSteps, int kMmaRows, int kGroups>
__device__ __forceinline__ void pack(Operand<kMmaRows, kParts, kSteps>& a,
                                     const Block<kMmaRows, kGroups>& x, int first_step) {
#pragma unroll
  for (int mi = 0; mi < kMmaRows; ++mi) {
#pragma unroll
    for (int kk = 0; kk < kGroups / 2; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = x[mi][i % 2][2 * kk + i / 2][0], high = x[mi][i % 2][2 * kk + i / 2][1];
        const u32 packed = Half::pack(low, high);
        a[mi][0][first_step + kk][i] = packed;
        if constexpr (kParts == 2)
          a[mi][1][first_step + kk][i] = pack_rest<Half>(low, high, packed);
      }
    }
  }
}

// acc += A B, B a tile stored [k][n], through the tensor core.
template <class Half, class T, int kMmaRows, int kParts, int kSteps, int kColumns>
__device__ __forceinline__ void accumulate(Block<kMmaRows, kColumns>& acc,
                                           const Operand<kMmaRows, kParts, kSteps>& a, u32 b_tile) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        u32 b[4];
        ptx::ldmatrix_x4_trans(b, bt_address<T>(b_tile, kk * 16, j * 8));
#pragma unroll
        for (int mi = 0; mi < kMmaRows; ++mi) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            Half::mma(acc[mi][0][j + h][0], acc[mi][0][j + h][1], acc[mi][1][j + h][0],
                      acc[mi][1][j + h][1], a[mi][part][kk], b[2 * h], b[2 * h + 1]);
          }
        }
      }
    }
  }
}

// The same with the product from zero and added in fp32.
template <class Half, class T, int kMmaRows, int kParts, int kSteps, int kColumns>
__device__ __forceinline__ void add_product(Block<kMmaRows, kColumns>& acc,
                                            const Operand<kMmaRows, kParts, kSteps>& a,
                                            u32 b_tile) {
#pragma unroll
  for (int j = 0; j < kColumns; j += 2) {
    float d[kMmaRows][2][4] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        u32 b[4];
        ptx::ldmatrix_x4_trans(b, bt_address<T>(b_tile, kk * 16, j * 8));
#pragma unroll
        for (int mi = 0; mi < kMmaRows; ++mi) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float (&x)[4] = d[mi][h];
            Half::mma(x[0], x[1], x[2], x[3], a[mi][part][kk], b[2 * h], b[2 * h + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kMmaRows * 8; ++i) {
      float& sum = acc[i / 8][i / 2 % 2][j + i / 4 % 2][i % 2];
      sum = __fadd_rn(sum, d[i / 8][i / 4 % 2][i % 4]);
    }
  }
}

// What `sanitise` took out of B before A B was added to acc, for those rows of A that see it: as
// the product would be.
template <class Half, class T, int kMmaRows, int kParts, int kSteps, int kColumns, class Sees>
__device__ __forceinline__ void add_specials(Block<kMmaRows, kColumns>& acc,
                                             const Operand<kMmaRows, kParts, kSteps>& a,
                                             const u16* map, const Sees& seen) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane % 4;
#pragma unroll 1
  for (int k = 0; k < kSteps * 16; ++k) {
#pragma unroll
    for (int i = 0; i < kMmaRows * 2 * kParts; ++i) {
      const int part = i % kParts, h = i / kParts % 2, mi = i / kParts / 2;
      u32 pair = 0;  // the registers that hold k, without an index that is known only at run time
#pragma unroll
      for (int eight = 0; eight < kSteps * 2; ++eight) {
        if (eight == k / 8) pair = a[mi][part][eight / 2][eight % 2 * 2 + h];
      }
      pair = __shfl_sync(0xffffffffu, pair, k % 8 / 2, 4);
      if (!seen(mi * 64 + warp * 16 + h * 8 + lane / 4).holds(k)) continue;
      const float weight = k % 2 == 0 ? low_half<Half>(pair) : high_half<Half>(pair);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const u32 kinds = map[k * SpecialMap<T>::kChunks + j] >> (4 * g);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const u32 kind = kinds >> (2 * e) & 3u;
          if (kind == 0) continue;
          const float special = __uint_as_float(kind == kIsNaN        ? 0x7fffffffu
                                                : kind == kIsPositive ? 0x7f800000u
                                                                      : 0xff800000u);
          acc[mi][h][j][e] = __fadd_rn(acc[mi][h][j][e], __fmul_rn(weight, special));
        }
      }
    }
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

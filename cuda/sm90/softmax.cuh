// The softmax update of a warp's sixteen rows by a tile of scores: the same steps as
// tile/softmax.cuh, arranged so that what is rare (a row that has seen nothing, a wide reference, a
// reference that must move) is one test of the warp and lies outside the usual path.
#pragma once

#include "tile/band.cuh"
#include "tile/softmax.cuh"

namespace cuflash::sm90 {

template <int kGroups>
using Scores = float[2][kGroups][2];

constexpr u32 kWholeWarp = 0xffffffffu;

// |r| >= 2^24, -inf included.
__device__ __forceinline__ bool unusual(float r) { return !(fabsf(r) < 16777216.0f); }

// Scores of keys that are not seen become -inf, in a tile from the warpgroup's first row and from
// its first key on.
template <int kGroups>
__device__ __forceinline__ void hide(Scores<kGroups>& s, const Band& band, i32 first_row, i32 key,
                                     int thread) {
  const i32 low = band.low_from(first_row, key), high = band.high_from(first_row, key);
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto columns = SeenColumns<kGroups>::of(low + row + 8 * i - column,
                                                  min(high + row + 8 * i, band.n_k - key) - column);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!columns.seen(j, e)) s[i][j][e] = negative_infinity();
      }
    }
  }
}

// The largest of each row's columns in this thread: two chains a row.
template <int kGroups>
__device__ __forceinline__ void row_tops(float (&top)[2], const Scores<kGroups>& s) {
  float other[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    top[i] = fmaxf(s[i][0][0], s[i][0][1]);
    other[i] = fmaxf(s[i][1][0], s[i][1][1]);
  }
#pragma unroll
  for (int j = 2; j < kGroups; j += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(fmaxf(top[i], s[i][j][0]), s[i][j][1]);
      other[i] = fmaxf(fmaxf(other[i], s[i][j + 1][0]), s[i][j + 1][1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], other[i]);
}

// References that follow the max. S becomes P; alpha: what O and l are multiplied by.
template <class A, int kGroups>
__device__ __forceinline__ void update(RowState (&rows)[2], Scores<kGroups>& s, float (&alpha)[2],
                                       float c) {
  float top[2], r[2], t[2];
  row_tops(top, s);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float old = rows[i].r;
    r[i] = rows[i].r = follow<A::kReference>(old, __fmul_rn(quad_max(top[i]), c));
    const bool same = old == r[i] || old == negative_infinity();
    alpha[i] = same ? 1.0f : ptx::ex2_approx_ftz(__fsub_rn(old, r[i]));
  }
  float factor[2] = {c, c};
  if (__any_sync(kWholeWarp, unusual(r[0]) || unusual(r[1]))) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (r[i] == negative_infinity()) r[i] = 0.0f;
      if (!unusual(r[i])) continue;
#pragma unroll
      for (int j = 0; j < 2 * kGroups; ++j) {
        float& x = (&s[i][0][0])[j];
        x = __fsub_rn(__fmul_rn(x, c), r[i]);
      }
      r[i] = 0.0f;
      factor[i] = 1.0f;  // fma(x, 1, -0) is x
    }
  }
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s[i][j][e] = ptx::ex2_approx_ftz(__fmaf_rn(s[i][j][e], factor[i], -r[i]));
        t[i] = j + e == 0 ? s[i][0][0] : __fadd_rn(t[i], s[i][j][e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) rows[i].l = __fmaf_rn(rows[i].l, alpha[i], t[i]);
}

// The A operands of P V: an accumulator's layout is that of an operand.
template <class Half, int kGroups>
__device__ __forceinline__ void pack(u32 (&p)[kGroups / 2][4], const Scores<kGroups>& s) {
#pragma unroll
  for (int kk = 0; kk < kGroups / 2; ++kk) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[kk][i] = Half::pack(s[i % 2][2 * kk + i / 2][0], s[i % 2][2 * kk + i / 2][1]);
  }
}

// x = s c - r of one score; unfused if kWide and the row's reference is wide.
template <bool kWide>
__device__ __forceinline__ float argument(float s, float c, float r) {
  if (kWide && unusual(r)) return __fsub_rn(__fmul_rn(s, c), r);
  return __fmaf_rn(s, c, -r);
}

// P = 2^x in halves, and this lane's sums t of P before it was rounded.
template <class Half, bool kWide, int kGroups>
__device__ __forceinline__ void rounded_probabilities(u32 (&p)[kGroups / 2][4], float (&t)[2],
                                                      const Scores<kGroups>& s, const float (&r)[2],
                                                      float c) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = ptx::ex2_approx_ftz(argument<kWide>(s[i][j][0], c, r[i])),
                  high = ptx::ex2_approx_ftz(argument<kWide>(s[i][j][1], c, r[i]));
      t[i] = __fadd_rn(j == 0 ? low : __fadd_rn(t[i], low), high);
      p[j / 2][j % 2 * 2 + i] = Half::pack(low, high);
    }
  }
}

// "stale": a reference stays until a lane's sum shows that it must move, by a whole power of two;
// the tile is then redone, and for that S is kept beside P.
template <class Half, int kGroups>
__device__ __forceinline__ void update_stale(RowState (&rows)[2], u32 (&p)[kGroups / 2][4],
                                             const Scores<kGroups>& s, float (&alpha)[2], float c,
                                             float limit) {
  float old[2], r[2], t[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) old[i] = rows[i].r;
  if (__any_sync(kWholeWarp, old[0] == negative_infinity() || old[1] == negative_infinity())) {
    float top[2];
    row_tops(top, s);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      rows[i].r = follow<Reference::kStale>(old[i], __fmul_rn(quad_max(top[i]), c));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) r[i] = rows[i].r == negative_infinity() ? 0.0f : rows[i].r;
  rounded_probabilities<Half, false>(p, t, s, r, c);
  if (__any_sync(kWholeWarp,
                 unusual(r[0]) || unusual(r[1]) || !(t[0] <= limit) || !(t[1] <= limit))) {
#pragma unroll 1
    for (int again = 0; again < 2; ++again) {
      if (again == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool move = quad_any(!(t[i] <= limit)) && rows[i].r != negative_infinity();
          float top = negative_infinity();
#pragma unroll
          for (int j = 0; j < kGroups; ++j)
            top = fmaxf(top, fmaxf(argument<true>(s[i][j][0], c, r[i]),
                                   argument<true>(s[i][j][1], c, r[i])));
          top = quad_max(top);
          if (move && fabsf(top) < __int_as_float(0x7f800000))
            r[i] = rows[i].r = __fadd_rn(rows[i].r, fmaxf(ceilf(top), 0.0f));
        }
      }
      rounded_probabilities<Half, true>(p, t, s, r, c);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool same = old[i] == rows[i].r || old[i] == negative_infinity();
    alpha[i] = same ? 1.0f : ptx::ex2_approx_ftz(__fsub_rn(old[i], rows[i].r));
    rows[i].l = __fmaf_rn(rows[i].l, alpha[i], t[i]);
  }
}

}  // namespace cuflash::sm90

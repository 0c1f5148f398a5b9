// One row's softmax state and its update by a tile of scores: the steps of emulation/tiled.py, in
// its names. A thread holds, of each of its rows, the columns 8 j + 2 g and 8 j + 2 g + 1 of a tile
// (g = lane % 4).
#pragma once

#include "tile/numerics.cuh"

namespace cuflash {

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// (l0 + l1) + (l2 + l3)
__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ bool quad_any(bool x) {
  i32 y = x;
  y |= __shfl_xor_sync(0xffffffffu, y, 1);
  y |= __shfl_xor_sync(0xffffffffu, y, 2);
  return y;
}

struct RowState {
  float r = negative_infinity();  // reference in log2 units; -inf: no key seen yet
  float m = negative_infinity();  // "tie-safe": rn(max * c) at the last move
  float l = 0.0f;                 // this lane's sum of the unrounded P
};

// The reference of a tile whose largest visible score (log2 units, rounded) is `top`.
template <Reference kReference>
__device__ __forceinline__ float follow(float r, float top) {
  if constexpr (kReference == Reference::kRowMax) {
    return fmaxf(r, top);
  } else if constexpr (kReference == Reference::kPowerOfTwo) {
    return fmaxf(r, ceilf(top));
  } else if constexpr (kReference == Reference::kLazy) {
    const float next = fmaxf(r, top);
    return r == negative_infinity() || __fsub_rn(next, r) > 8.0f ? next : r;
  } else if constexpr (kReference == Reference::kStale) {
    return r == negative_infinity() ? ceilf(top) : r;
  }
  return r;  // kFinal: found in a first pass; kTieSafe: see tie_safe
}

// P = 2^(s c - r) and this lane's sums t. Rows are inside: their chains of additions are
// independent. A reference of 2^24 or more is so coarse that a fused subtraction could leave whole
// units at the max, and 2^x overflow; such rows round s c before they subtract.
template <class A, int kRows, int kGroups>
__device__ __forceinline__ void probabilities(float (&p)[kRows][kGroups][2], float (&t)[kRows],
                                              const float (&s)[kRows][kGroups][2],
                                              const float (&reference)[kRows], float c) {
  float r[kRows];
  bool wide[kRows], any = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) any |= wide[i] = fabsf(r[i] = reference[i]) >= 16777216.0f;
  if (&p != &s) {
#pragma unroll
    for (int i = 0; i < kRows * kGroups * 2; ++i) (&p[0][0][0])[i] = (&s[0][0][0])[i];
  }
  if (__any_sync(0xffffffffu, any)) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = p[i][j][e];
          x = wide[i] ? __fsub_rn(__fmul_rn(x, c), r[i]) : __fmaf_rn(x, c, -r[i]);
        }
      }
      r[i] = 0.0f;
    }
    c = 1.0f;  // fma(x, 1, -0) is x
  }
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        p[i][j][e] = exp2_of<A::kExp2>(__fmaf_rn(p[i][j][e], c, -r[i]), j);
        t[i] = j + e == 0 ? p[i][0][0] : __fadd_rn(t[i], p[i][j][e]);
      }
    }
  }
}

// The largest of each row's columns in this thread.
template <int kRows, int kGroups>
__device__ __forceinline__ void thread_max(float (&top)[kRows],
                                           const float (&s)[kRows][kGroups][2]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) top[i] = fmaxf(s[i][0][0], s[i][0][1]);
#pragma unroll
  for (int j = 1; j < kGroups; ++j) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) top[i] = fmaxf(top[i], fmaxf(s[i][j][0], s[i][j][1]));
  }
}

// "tie-safe": one above the max, in whole units of log2, if another score is near it.
template <int kGroups>
__device__ __forceinline__ void tie_safe(RowState& row, const float (&s)[kGroups][2], float top,
                                         float c) {
  const float m = fmaxf(row.m, top);
  int near = 0;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    near += __fmaf_rn(s[j][0], c, -m) >= -0.001953125f;
    near += __fmaf_rn(s[j][1], c, -m) >= -0.001953125f;
  }
  near += __shfl_xor_sync(0xffffffffu, near, 1);
  near += __shfl_xor_sync(0xffffffffu, near, 2);
  const float next = near > 1 ? __fadd_rn(floorf(m), 1.0f) : m;
  if (top != negative_infinity() && !(next <= row.r)) {
    row.r = next;
    row.m = m;
  }
}

// S -> P for the rows of a thread and one tile; masked scores are -inf. alpha: what O and l are
// multiplied by.
template <class A, int kRows, int kGroups>
__device__ __forceinline__ void softmax(RowState (&rows)[kRows], float (&s)[kRows][kGroups][2],
                                        float (&alpha)[kRows], float c, float stale_limit) {
  float r_old[kRows], r[kRows], t[kRows];
  bool fresh = A::kReference != Reference::kStale;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    r_old[i] = rows[i].r;
    fresh |= r_old[i] == negative_infinity();
  }
  // "stale" needs a max for rows that see their first key only.
  if (A::kReference != Reference::kFinal && __any_sync(0xffffffffu, fresh)) {
    float top[kRows];
    thread_max(top, s);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      top[i] = __fmul_rn(quad_max(top[i]), c);
      if constexpr (A::kReference == Reference::kTieSafe) {
        tie_safe(rows[i], s[i], top[i], c);
      } else {
        rows[i].r = follow<A::kReference>(r_old[i], top[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) r[i] = rows[i].r == negative_infinity() ? 0.0f : rows[i].r;
  if constexpr (A::kReference == Reference::kStale) {
    float p[kRows][kGroups][2];
    probabilities<A>(p, t, s, r, c);
    // A tile's sum shows that a reference must move: by a whole power of two, and the tile is
    // redone.
    bool move[kRows], any = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      move[i] = quad_any(!(t[i] <= stale_limit)) && rows[i].r != negative_infinity();
      any |= move[i];
    }
    if (__any_sync(0xffffffffu, any)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float top = negative_infinity();
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          top = fmaxf(top, fmaxf(__fmaf_rn(s[i][j][0], c, -r[i]), __fmaf_rn(s[i][j][1], c, -r[i])));
        }
        top = quad_max(top);
        if (move[i] && fabsf(top) < __int_as_float(0x7f800000)) {
          r[i] = rows[i].r = __fadd_rn(rows[i].r, fmaxf(ceilf(top), 0.0f));
        }
      }
      probabilities<A>(p, t, s, r, c);
    }
#pragma unroll
    for (int i = 0; i < kRows * kGroups * 2; ++i) (&s[0][0][0])[i] = (&p[0][0][0])[i];
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool same = r_old[i] == rows[i].r || r_old[i] == negative_infinity();
    alpha[i] = same ? 1.0f : exp2_factor<A::kExp2>(__fsub_rn(r_old[i], rows[i].r));
  }
  if constexpr (A::kReference != Reference::kStale) probabilities<A>(s, t, s, r, c);
#pragma unroll
  for (int i = 0; i < kRows; ++i) rows[i].l = __fmaf_rn(rows[i].l, alpha[i], t[i]);
}

}  // namespace cuflash

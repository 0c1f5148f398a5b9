// One row's softmax state and its update by a tile of scores: the steps of emulation/flash.py, in its names.
// A thread holds, of each of its rows, the columns 8 j + 2 g and 8 j + 2 g + 1 of a tile (g = lane % 4).
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
    return r == negative_infinity() ? top : r;
  }
  return r;  // kFinal: found in a first pass; kTieSafe: see tie_safe
}

// S -> P for one row of a tile; returns alpha. s: [kGroups][2], masked scores are -inf.
template <class A, int kGroups>
__device__ __forceinline__ float softmax_row(RowState& row, float (&s)[kGroups][2], float c,
                                             float stale_limit) {
  const float r_old = row.r;
  if constexpr (A::kReference != Reference::kFinal) {
    float top = negative_infinity();
    if (A::kReference != Reference::kStale || r_old == negative_infinity()) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) top = fmaxf(top, fmaxf(s[j][0], s[j][1]));
    }
    top = __fmul_rn(quad_max(top), c);
    if constexpr (A::kReference == Reference::kTieSafe) {
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
    } else {
      row.r = follow<A::kReference>(r_old, top);
    }
  }
  const float r_first = row.r == negative_infinity() ? 0.0f : row.r;
  float r = r_first, t = 0.0f, p[kGroups][2];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      p[j][e] = exp2_of<A::kExp2>(__fmaf_rn(s[j][e], c, -r), j);
      t = j + e == 0 ? p[0][0] : __fadd_rn(t, p[j][e]);
    }
  }
  if constexpr (A::kReference == Reference::kStale) {
    // The tile's sum shows that the reference must move: by a whole power of two, and the tile is redone.
    const bool move = quad_any(!(t <= stale_limit)) && row.r != negative_infinity();
    if (__any_sync(0xffffffffu, move)) {
      float top = negative_infinity();
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        top = fmaxf(top, fmaxf(__fmaf_rn(s[j][0], c, -r), __fmaf_rn(s[j][1], c, -r)));
      }
      top = quad_max(top);
      if (move && fabsf(top) < __int_as_float(0x7f800000)) r = row.r = __fadd_rn(row.r, ceilf(top));
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          p[j][e] = exp2_of<A::kExp2>(__fmaf_rn(s[j][e], c, -r), j);
          t = j + e == 0 ? p[0][0] : __fadd_rn(t, p[j][e]);
        }
      }
    }
  }
  const float alpha =
      r_old == row.r || r_old == negative_infinity() ? 1.0f : exp2_factor<A::kExp2>(__fsub_rn(r_old, row.r));
  row.l = __fmaf_rn(row.l, alpha, t);
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    s[j][0] = p[j][0];
    s[j][1] = p[j][1];
  }
  return alpha;
}

}  // namespace cuflash

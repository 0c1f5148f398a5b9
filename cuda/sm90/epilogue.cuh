// How O goes from the registers of the Hopper forward to global memory, and the kernel's
// parameters.
#pragma once

#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "sm90/schedule.cuh"
#include "sm90/softmax.cuh"
#include "tile/nonfinite.cuh"

namespace cuflash::sm90 {

struct ForwardParams {
  ptx::TensorMap q_map, k_map, v_map;
  const u16* v;
  void* out;
  u16* rest;     // what O lost when it was rounded, in the order of out; null if nobody asks
  float* lse;    // (batch, heads, n_q)
  u32* counter;  // of work handed out; 0 between launches
  Strides v_strides, out_strides, rest_strides;
  Band band;
  Order order;
  i32 d_v;
  i32 masked;         // whether a mask hides keys that exist
  float c;            // a score times c is in log2 units
  float cap;          // softcap: a score times cap is the argument of tanh
  float stale_limit;  // "stale": a lane's sum above this moves the reference
};

// 64 rows of one head: those of a warpgroup.
struct Rows {
  i32 batch, head, first;
};

// Whether there is such a row: the first block of a head may begin before it.
__device__ __forceinline__ bool exists(const Band& band, i32 row) {
  return static_cast<u32>(row) < static_cast<u32>(band.n_q);
}

// O in float32, from registers to global memory. row: this thread's first one.
template <int kDv, int kColumns>
__device__ __forceinline__ void write_float(const ForwardParams& params, const Rows& rows, i32 row,
                                            const Scores<kColumns>& o) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!exists(params.band, row + 8 * i)) continue;
    float* out = static_cast<float*>(params.out) +
                 params.out_strides.at(rows.batch, rows.head, row + 8 * i) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kDv / 8; ++j) {
      if (j * 8 < params.d_v)
        *reinterpret_cast<float2*>(out + j * 8) = make_float2(o[i][j][0], o[i][j][1]);
    }
  }
}

// Word i of lane j of every four lanes, to word j of lane i.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool odd = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 got = __shfl_xor_sync(kWholeWarp, odd ? x[i] : x[i ^ bit], bit);
      (odd ? x[i] : x[i ^ bit]) = got;
    }
  }
}

// Likewise in halves, O itself or what rounding takes from it: pack makes one word of two columns.
// The four threads of a row exchange what they have of 32 columns, so that each writes eight.
template <int kDv, int kColumns, class Pack>
__device__ __forceinline__ void write_halves(const ForwardParams& params, u16* to,
                                             const Strides& strides, const Rows& rows, i32 row,
                                             const Scores<kColumns>& o, Pack pack) {
  const int first = threadIdx.x % 4 * 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool inside = exists(params.band, row + 8 * i);
    u16* out = to + strides.at(rows.batch, rows.head, row + 8 * i) + first;
#pragma unroll
    for (int j = 0; j < kDv / 8; j += 4) {
      u32 x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = pack(o[i][j + e][0], o[i][j + e][1]);
      transpose_quad(x);
      if (inside && j * 8 + first < params.d_v) ptx::st_global_v4(out + j * 8, x);
    }
  }
}

// NaN and Inf of V that were taken out, to the rows of O that see them outside the keys
// [full_begin, full_end).
template <class Half, bool kFloatOut>
__device__ __forceinline__ void add_specials(const ForwardParams& params, const Rows& rows,
                                             i32 full_begin, i32 full_end) {
  const Band& band = params.band;
  const u16* v = params.v + params.v_strides.at(rows.batch, params.order.by_group.of(rows.head), 0);
#pragma unroll 1
  for (i32 i = threadIdx.x % 128; i < min(64, band.n_q - rows.first) * params.d_v; i += 128) {
    const i32 local = i / params.d_v, column = i % params.d_v, row = rows.first + local;
    const float special =
        visible_special<Half>(band, v + column, params.v_strides.row, row, full_begin, full_end);
    if (special == 0.0f) continue;
    const i64 at = params.out_strides.at(rows.batch, rows.head, row) + column;
    if constexpr (kFloatOut) {
      float* out = static_cast<float*>(params.out) + at;
      *out = __fadd_rn(*out, special);
    } else {
      u16* out = static_cast<u16*>(params.out) + at;
      *out = static_cast<u16>(Half::pack(__fadd_rn(Half::widen(*out), special), 0.0f));
      if (params.rest != nullptr)  // Inf - Inf
        params.rest[params.rest_strides.at(rows.batch, rows.head, row) + column] = 0x7fff;
    }
  }
}

}  // namespace cuflash::sm90

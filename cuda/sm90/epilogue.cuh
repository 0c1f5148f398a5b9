// How O goes from the registers of the Hopper forward to global memory, and the kernel's
// parameters.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "sm90/schedule.cuh"
#include "sm90/softmax.cuh"
#include "tile/nonfinite.cuh"

namespace cuflash::sm90 {

struct ForwardParams {
  ptx::TensorMap q_map, k_map, v_map;
  ptx::TensorMap out_map, rest_map;  // where Shape::kStaged, of half outputs
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

// The same through shared memory: a warp puts its sixteen rows there, panel after panel, and TMA
// takes them while the warp goes on. A block of rows begins when all its places are free; of its
// panels, of which `first` were before these, the n-th has place n % 2, free again when all stores
// but the last have read theirs.
template <class T, int kColumns, class Pack>
__device__ __forceinline__ void stage_halves(const ptx::TensorMap& map, u32 places, int first,
                                             const Rows& rows, const Band& band, int lane,
                                             const Scores<kColumns>& o, Pack pack) {
  // Some of them are there if the first is: a head's first block lacks a multiple of 64 rows.
  const bool there = exists(band, rows.first);
#pragma unroll
  for (int panel = 0; panel < T::kCount; ++panel) {
    const u32 place = places + (first + panel) % 2 * T::kPanelBytes;
    ptx::cp_async_bulk_wait_group_read<1>();
    __syncwarp();
#pragma unroll
    for (int column = 0; column < min(kPanelCols, T::kCols - panel * kPanelCols); column += 16) {
      const int j = (panel * kPanelCols + column) / 8;
      u32 x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = pack(o[e % 2][j + e / 2][0], o[e % 2][j + e / 2][1]);
      ptx::stmatrix_x4(place + T::chunk(lane % 16, column + lane / 16 * 8), x[0], x[1], x[2], x[3]);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      if (there)
        ptx::tma_store_4d(place, map, panel * kPanelCols, rows.first, rows.head, rows.batch);
      ptx::cp_async_bulk_commit_group();
    }
  }
}

// O of a warpgroup's rows, and what rounding takes from it. places: of its warps, for panels.
template <class S, bool kFloatOut, int kColumns>
__device__ __forceinline__ void write_output(const ForwardParams& params, const Rows& rows,
                                             u32 places, const Scores<kColumns>& o) {
  using Half = typename S::Half;
  const int thread = threadIdx.x % 128;
  const i32 row = rows.first + thread / 32 * 16 + thread % 32 / 4;
  auto rounded = [](float x, float y) { return Half::pack(x, y); };
  auto rest = [](float x, float y) { return pack_rest<Half>(x, y, Half::pack(x, y)); };
  if constexpr (kFloatOut) {
    write_float<S::kDv>(params, rows, row, o);
  } else if constexpr (S::kStaged) {
    using T = typename S::O;
    const int warp = __shfl_sync(kWholeWarp, thread / 32, 0), lane = thread % 32;
    const Rows own = {rows.batch, rows.head, rows.first + warp * 16};
    places += warp * 2 * T::kPanelBytes;
    ptx::cp_async_bulk_wait_group_read<0>();  // by stores of the block before
    if (params.rest != nullptr)
      stage_halves<T>(params.rest_map, places, 0, own, params.band, lane, o, rest);
    stage_halves<T>(params.out_map, places, T::kCount, own, params.band, lane, o, rounded);
  } else {
    if (params.rest != nullptr)
      write_halves<S::kDv>(params, params.rest, params.rest_strides, rows, row, o, rest);
    write_halves<S::kDv>(params, static_cast<u16*>(params.out), params.out_strides, rows, row, o,
                         rounded);
  }
}

// NaN and Inf of V that were taken out, to the rows of O that see them outside the keys
// [full_begin, full_end), when the whole warpgroup has written them.
template <class Half, bool kFloatOut>
__device__ __forceinline__ void add_specials(const ForwardParams& params, const Rows& rows,
                                             u32 barrier, i32 full_begin, i32 full_end) {
  ptx::cp_async_bulk_wait_group<0>();
  ptx::fence_proxy_async_all();
  ptx::bar_sync(barrier, 128);
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

// What the Hopper backward's kernels share: parameters, a piece of work, products as chains of
// wgmma, and P and dS of one warpgroup. The arithmetic is that of emulation/backward.py.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/gradient.cuh"
#include "tile/panel.cuh"

namespace cuflash::sm90 {

constexpr u32 kWholeWarp = 0xffffffffu;
constexpr int kConsumers = 256, kThreads = 384;  // two warpgroups, and one that loads and adds
// Named barriers; 0 is __syncthreads.
constexpr u32 kTurn = 1, kWarpgroup = 3, kBoth = 5;  // the first two + warpgroup

struct BackwardParams {
  ptx::TensorMap q_map, k_map, v_map, dout_map, dk_map, dv_map;  // the last two: half outputs only
  const u16 *q, *k, *dout;
  void *dq, *dk, *dv;
  const float *lse2, *delta;  // (batch, heads, pitch): LSE log2(e), and rowsum(dO O) - dLSE
  float* sums;                // dQ so far, see sm90/sums.cuh
  i32* turns;           // (batch * heads, blocks): key tiles that have been added; zeros at first
  i32* tickets;         // for tiles of keys, and for conversions; 0 at first
  float* row_sums;      // (batch * heads, blocks, kBlockM): of dS so far; where dQ is centred
  const float* dlse;    // (batch * heads, n_q), or null
  const u32* centered;  // (batch * key heads, pitch / 32): a bit for each row; null without center
  Strides q_strides, k_strides, dout_strides, dq_strides, dk_strides, dv_strides;
  Band band;
  i32 heads, group;  // query heads, query heads per key head
  i32 d, d_v;
  i32 pitch;       // n_q rounded up to a multiple of 128
  i32 descending;  // order in which the key tiles are added to dQ
  i32 masked;      // whether a mask hides keys that exist
  i32 interleave;  // heads whose tickets alternate
  i32 pieces;      // tiles of keys of all heads: whose first ticket is for none converts dQ
  float c;         // a score times c is in log2 units
  float cap;       // softcap: a score times cap is the argument of tanh
  float scale;     // of dQ and dK
  i32 center;      // of the Plan
};

// A thread's accumulators of 64 x 8 kGroups.
template <int kGroups>
using Accumulator = float[2][kGroups][2];

template <int kGroups>
__device__ __forceinline__ void clear(Accumulator<kGroups>& x) {
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) (&x[0][0][0])[i] = 0.0f;
}

// A word of shared memory, by a whole warp for all its lanes. The compiler then knows that they
// have the same, and that what follows from it is alike: what a descriptor is made of then costs no
// way from vector registers.
__device__ __forceinline__ i32 load_alike(u32 from) {
  return __shfl_sync(kWholeWarp, threadIdx.x % 32 == 0 ? ptx::ld_shared(from) : 0, 0);
}

// A tile of keys and the blocks of rows that see it, of all query heads of the group. In this order
// in shared memory, too.
template <int kBlockM, int kBlockN>
struct Piece {
  i32 ticket, tile, batch, kv_head, first_key;
  i32 block_begin, blocks, steps;
  i32 plain_begin, plain_end;  // blocks whose rows all exist and see the whole tile
  static constexpr u32 kBytes = 40;

  // Tickets run over the tiles of a head in the order in which they are added to dQ, those of
  // `interleave` heads side by side.
  __device__ __forceinline__ Piece(const BackwardParams& params, i32 ticket) : ticket(ticket) {
    const Band& band = params.band;
    const i32 tiles = (band.n_k + kBlockN - 1) / kBlockN, kv_heads = params.heads / params.group;
    const i32 all_heads = params.pieces / tiles;
    const i32 first_head = ticket / (params.interleave * tiles) * params.interleave;
    // 1 behind the last ticket, whose piece is not looked at.
    const i32 together = max(min(params.interleave, all_heads - first_head), 1);
    const i32 place = ticket - first_head * tiles;
    tile = params.descending ? tiles - 1 - place / together : place / together;
    const i32 flat = first_head + place % together;
    batch = flat / kv_heads;
    kv_head = flat - batch * kv_heads;
    first_key = tile * kBlockN;
    const RowsOfKey rows{band, 0, first_key};
    const i32 row_begin = rows(0).low, row_end = rows(min(kBlockN, band.n_k - first_key) - 1).high;
    block_begin = row_begin / kBlockM;
    blocks = row_end > row_begin ? (row_end + kBlockM - 1) / kBlockM - block_begin : 0;
    steps = blocks * params.group;
    const i32 all_see = rows.row_of(static_cast<i64>(first_key) + kBlockN - 1 - band.right);
    plain_begin = (all_see + kBlockM - 1) / kBlockM;
    plain_end = rows.row_of(static_cast<i64>(first_key) + band.left + 1) / kBlockM;
    if (first_key + kBlockN > band.n_k) plain_end = plain_begin;
  }

  // To shared memory; from it by plain loads, so that what is not used is not loaded, and all is
  // loaded again behind a wait; and one of its numbers, by a whole warp.
  __device__ __forceinline__ void store(u32 to) const {
    static_assert(sizeof(Piece) == kBytes, "all of it");
#pragma unroll
    for (u32 i = 0; i < kBytes / 4; ++i) ptx::st_shared(to + 4 * i, (&ticket)[i]);
  }
  __device__ __forceinline__ explicit Piece(u32 from) {
#pragma unroll
    for (u32 i = 0; i < kBytes / 4; ++i)
      (&ticket)[i] = *reinterpret_cast<const i32*>(__cvta_shared_to_generic(from + 4 * i));
  }
  __device__ __forceinline__ static i32 field(u32 from, i32 Piece::* which) {
    Piece any;
    return load_alike(from + 4 * static_cast<u32>(&(any.*which) - &any.ticket));
  }
  Piece() = default;

  __device__ __forceinline__ bool plain(i32 block) const {
    return block >= plain_begin && block < plain_end;
  }
};

// Steps of a piece one after the other: blocks of rows in ascending order, head after head.
struct Walk {
  i32 head, block;

  template <class P>
  __device__ __forceinline__ static Walk at(const P& piece, i32 group, i32 step) {
    const i32 heads = step / max(piece.blocks, 1);
    return {piece.kv_head * group + heads, piece.block_begin + step - heads * piece.blocks};
  }
  template <class P>
  __device__ __forceinline__ void next(const P& piece) {
    if (++block < piece.block_begin + piece.blocks) return;
    block = piece.block_begin;
    ++head;
  }
};

// How many tiles of keys add to a block of rows before this one.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ i32 turn_of(const BackwardParams& params, i32 tile, i32 block) {
  const Band& band = params.band;
  const i32 first_row = block * kBlockM, last_row = min(first_row + kBlockM, band.n_q) - 1;
  if (params.descending)
    return (static_cast<u32>(band.high(last_row)) + kBlockN - 1) / kBlockN - 1 - tile;
  return tile - static_cast<u32>(band.low(first_row)) / kBlockN;
}

// How many tiles of keys add to it in all.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ i32 turns_of(const Band& band, i32 block) {
  const i32 first_row = block * kBlockM, last_row = min(first_row + kBlockM, band.n_q) - 1;
  const i32 low = band.low(first_row), high = band.high(last_row);
  return high > low ? (high + kBlockN - 1) / kBlockN - low / kBlockN : 0;
}

// By one thread: rows of all panels by TMA.
template <class T>
__device__ __forceinline__ void load_panels(const ptx::TensorMap& map, u32 to, u32 full, i32 row,
                                            i32 head, i32 batch) {
  for (int i = 0; i < T::kCount; ++i)
    ptx::tma_load_4d(to + i * T::kPanelBytes, map, full, i * kPanelCols, row, head, batch);
}

// -- Products -------------------------------------------------------------------------------------

// acc = A B^T over kCols columns; a and b: descriptors of rows of panels.
template <bool kBf16, class A, class B, int kCols, int kGroups>
__device__ __forceinline__ void issue_columns(Accumulator<kGroups>& acc, u32 a, u32 b) {
#pragma unroll
  for (int kk = 0; kk < kCols / 16; ++kk) {
    const u32 a_step = (kk / 4 * A::kPanelBytes + kk % 4 * 32) / 16,
              b_step = (kk / 4 * B::kPanelBytes + kk % 4 * 32) / 16;
    ptx::Wgmma<8 * kGroups>::template ss<kBf16, 0>(acc, whole(a + a_step), whole(b + b_step),
                                                   kk > 0);
  }
}

// acc += A B with A in registers, kSteps * 16 rows of B.
template <bool kBf16, int kSteps, int kGroups>
__device__ __forceinline__ void issue_rows(Accumulator<kGroups>& acc, const u32 (&a)[kSteps][4],
                                           u32 b) {
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk)
    ptx::Wgmma<8 * kGroups>::template rs<kBf16, 0>(acc, a[kk],
                                                   whole(b + kk * 16 * kPanelPitch / 16));
}

// acc += A^T B over 64 rows of both.
template <bool kBf16, int kGroups>
__device__ __forceinline__ void issue_both_rows(Accumulator<kGroups>& acc, u32 a, u32 b) {
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    constexpr u32 kStep = 16 * kPanelPitch / 16;
    ptx::Wgmma<8 * kGroups>::template ss_as<kBf16, 0, true, true>(acc, whole(a + kk * kStep),
                                                                  whole(b + kk * kStep), true);
  }
}

// acc = (A^T B^T): 64 columns of A's kRows rows, and rows of B, whose columns are A's rows.
template <bool kBf16, class B, int kRows, int kGroups>
__device__ __forceinline__ void issue_transposed(Accumulator<kGroups>& acc, u32 a, u32 b) {
#pragma unroll
  for (int kk = 0; kk < kRows / 16; ++kk) {
    const u32 b_step = (kk / 4 * B::kPanelBytes + kk % 4 * 32) / 16;
    ptx::Wgmma<8 * kGroups>::template ss_as<kBf16, 0, true, false>(
        acc, whole(a + kk * 16 * kPanelPitch / 16), whole(b + b_step), kk > 0);
  }
}

// -- P and dS of a warpgroup: rows are keys, columns queries --------------------------------------

// Of this thread: its first key, and the first column of each group of eight.
struct Place {
  int key, column;

  __device__ __forceinline__ static Place of(int thread) {
    return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
  }
};

// The columns of this thread that see each of its two keys.
template <int kGroups>
using Seen = SeenColumns<kGroups>[2];

// visible: the columns that see a key.
template <int kGroups, class Visible>
__device__ __forceinline__ void look(Seen<kGroups>& seen, const Place& place,
                                     const Visible& visible) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Range range = visible(place.key + 8 * h);
    seen[h] = SeenColumns<kGroups>::of(range.low - place.column, range.high - place.column);
  }
}

// Zeros where a row does not see a key. first: of x's groups among those of `seen`.
template <int kGroups, int kAll>
__device__ __forceinline__ void clear_unseen(Accumulator<kGroups>& x,
                                             const SeenColumns<kAll> (&seen)[2], int first = 0) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      if (!seen[h].seen(first + i / 2, i % 2)) x[h][i / 2][i % 2] = 0.0f;
    }
  }
}

// S -> P = 2^(s c - LSE); with a softcap s, capped, is kept in `slope` as 1 - s^2.
template <bool kSoftcap, int kGroups, int kSlopes>
__device__ __forceinline__ void probabilities(Accumulator<kGroups>& s, Accumulator<kSlopes>& slope,
                                              u32 lse2, const BackwardParams& params) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const float2 l = ptx::ld_shared_v2(lse2 + j * 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[h][j][e];
        if constexpr (kSoftcap) {
          x = capped(x, params.cap);
          slope[h][j][e] = __fmaf_rn(-x, x, 1.0f);
        }
        x = ptx::ex2_approx_ftz(__fmaf_rn(x, params.c, e == 0 ? -l.x : -l.y));
      }
    }
  }
}

// dP -> dS = P (dP - delta), times the slope of the softcap.
template <bool kSoftcap, int kGroups, int kSlopes>
__device__ __forceinline__ void score_gradients(Accumulator<kGroups>& dp,
                                                const Accumulator<kGroups>& p,
                                                const Accumulator<kSlopes>& slope, u32 delta) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const float2 l = ptx::ld_shared_v2(delta + j * 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = dp[h][j][e];
        x = __fmul_rn(p[h][j][e], __fsub_rn(x, e == 0 ? l.x : l.y));
        if constexpr (kSoftcap) x = __fmul_rn(x, slope[h][j][e]);
      }
    }
  }
}

// In halves, as the A operand of a product over the columns.
template <class Half, int kGroups>
__device__ __forceinline__ void pack(u32 (&a)[kGroups / 2][4], const Accumulator<kGroups>& x) {
#pragma unroll
  for (int kk = 0; kk < kGroups / 2; ++kk) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[kk][i] = Half::pack(x[i % 2][2 * kk + i / 2][0], x[i % 2][2 * kk + i / 2][1]);
  }
}

// Halves of 64 keys (from `key`) x 16 kSteps queries to panels of a row per query. thread: of the
// warpgroup.
template <class T, int kSteps>
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&a)[kSteps][4], int key,
                                                 int thread) {
  const int lane = thread % 32, query = lane / 16 * 8 + lane % 8,
            column = key + thread / 32 * 16 + lane / 8 % 2 * 8;
  const u32 at = to + T::chunk(query, column);
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk)
    ptx::stmatrix_x4_trans(at + kk * 16 * kPanelPitch, a[kk][0], a[kk][1], a[kk][2], a[kk][3]);
}

// The first kUsed groups of the accumulators of 64 rows (keys) in halves to panels, for a store by
// TMA.
template <class Half, class T, int kUsed, int kGroups>
__device__ __forceinline__ void stage_rows(u32 to, int row, const Accumulator<kGroups>& x,
                                           float factor, int thread) {
  const int lane = thread % 32, m = row + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < kUsed; j += 2) {
    u32 r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = Half::pack(__fmul_rn(x[i % 2][j + i / 2][0], factor),
                        __fmul_rn(x[i % 2][j + i / 2][1], factor));
    ptx::stmatrix_x4(to + T::chunk(m, j * 8 + lane / 16 * 8), r[0], r[1], r[2], r[3]);
  }
}

// The same in float32 to global memory.
template <int kGroups>
__device__ __forceinline__ void write_rows(float* to, i64 row_stride, i32 rows, int columns,
                                           const Accumulator<kGroups>& x, float factor,
                                           int thread) {
  const Place place = Place::of(thread);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (place.key + 8 * h >= rows) continue;
    float* row = to + (place.key + 8 * h) * row_stride + place.column;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (j * 8 < columns)
        *reinterpret_cast<float2*>(row + j * 8) =
            make_float2(__fmul_rn(x[h][j][0], factor), __fmul_rn(x[h][j][1], factor));
    }
  }
}

// By a warpgroup: its 64 rows of staged panels to global memory, by TMA; where they exist.
template <class T, class P>
__device__ __forceinline__ void send_rows(const ptx::TensorMap& map, u32 from, const P& piece,
                                          i32 n_k, int warpgroup) {
  ptx::fence_proxy_async();
  ptx::bar_sync(kWarpgroup + warpgroup, 128);
  if (ptx::thread_index() % 128 != 0) return;
  const i32 key = piece.first_key + warpgroup * 64;
  for (int i = 0; key < n_k && i < T::kCount; ++i)
    ptx::tma_store_4d(from + i * T::kPanelBytes + warpgroup * 64 * kPanelPitch, map, i * kPanelCols,
                      key, piece.kv_head, piece.batch);
  ptx::cp_async_bulk_commit_group();
}

// The same in float32, from registers.
template <class P, int kGroups>
__device__ __forceinline__ void store_rows(void* to, const Strides& strides, const P& piece,
                                           i32 n_k, int columns, const Accumulator<kGroups>& x,
                                           float factor, int warpgroup) {
  const i32 key = piece.first_key + warpgroup * 64;
  write_rows(static_cast<float*>(to) + strides.at(piece.batch, piece.kv_head, key), strides.row,
             n_k - key, columns, x, factor, ptx::thread_index() % 128);
}

}  // namespace cuflash::sm90

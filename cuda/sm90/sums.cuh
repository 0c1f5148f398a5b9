// dQ on its way: each tile's share is added to fp32 sums in global memory in the Plan's order, up
// to 128 columns through shared memory by bulk copies, above from registers.
//
// Sums of a block of rows are kept in parts of 64 columns of the head, as in registers: part,
// group of eight queries, thread of a warpgroup, four floats (columns c and c + 8 of two queries).
//
// Order. Each block of rows has a count of the tiles that have been added; a tile waits until it
// equals its turn, adds, waits until the addition has been made, and raises the count. A tile waits
// only for tiles of lower tickets, which have ended, run, or come next in a CTA whose tile before
// has a lower ticket still. Nothing that a tile does for one step waits for a later one of its own:
// a share's place in shared memory is given back as soon as it was read, and additions are made by
// two warps that do nothing else, or, above 128 columns, by consumers before they go on. So of the
// tiles that have not ended the one with the lowest ticket runs, waits for nobody, ends, and then
// the next, whatever else is resident. CTAs that get no tile convert the sums (sm90/convert.cuh),
// when every tile is some resident CTA's.
//
// Small numbers. The Plan's additions keep subnormals, and so do bulk additions (measured: the PTX
// text does not say). Additions from registers, above 128 columns, flush them. The two agree while
// all shares of a block are 0 or at least 2^-101: those are multiples of 2^-124, and so are their
// sums, none of which then is subnormal. A share with something smaller is added by loads and
// stores, and so are all later ones of its block, whose count says so.
//
// Sums of the rows of dS (sm90/row_sums.cuh), where dQ is centred, are added when the share is,
// before the count is raised. Up to 128 columns they come with it, through a place of which there
// is but one: it is given back as soon as a warp has taken them, which waits for the turn of an
// earlier step at most. So does dS, which is summed when the share has found its place. Above, a
// warp of its own reads them in dS, and holds that until the turns of earlier steps have come. So
// what is said above still holds. For a block without a centred row nothing is made or added, nor a
// place waited for.
#pragma once

#include "sm90/row_sums.cuh"

namespace cuflash::sm90 {

constexpr i32 kSmall = 1 << 30;  // beside a count: sums may be subnormal

// kM: queries of a part.
template <int kM>
struct Part {
  static constexpr int kBytes = kM * 64 * 4;

  // This thread's place for its first four floats; the next group is 2048 bytes on.
  __device__ __forceinline__ static u32 of(u32 part, int thread) { return part + thread * 16; }
};

// Numbers not 0 and below 2^-101: sums of such may be subnormal (see above).
constexpr float kLeast = 3.94430452610505902705864e-31f;

__device__ __forceinline__ bool is_small(float x) {
  return __float_as_uint(x) * 2 - 1 < __float_as_uint(kLeast) * 2 - 1;
}

// Whether a warp's share holds something small.
template <int kGroups>
__device__ __forceinline__ bool holds_small(const Accumulator<kGroups>& x) {
  float least[4];  // four chains, for the sake of latency
#pragma unroll
  for (int i = 0; i < 4; ++i) least[i] = fabsf((&x[0][0][0])[i]);
#pragma unroll
  for (int i = 4; i < 4 * kGroups; ++i) least[i % 4] = fminf(least[i % 4], fabsf((&x[0][0][0])[i]));
  const float all = fminf(fminf(least[0], least[1]), fminf(least[2], least[3]));
  if (!__any_sync(kWholeWarp, all < kLeast)) return false;
  bool small = false;
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) small |= is_small((&x[0][0][0])[i]);
  return __any_sync(kWholeWarp, small);
}

// A warpgroup's share into a part in shared memory, at this thread's place.
template <int kGroups>
__device__ __forceinline__ void store_share(u32 to, const Accumulator<kGroups>& x) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j)
    ptx::st_shared_v4(to + j * 2048, x[0][j][0], x[0][j][1], x[1][j][0], x[1][j][1]);
}

// A warpgroup's share from registers to a part of the sums, at this thread's place. first: nothing
// was added before. exactly: with subnormals.
template <int kGroups>
__device__ __forceinline__ void add_registers(float* to, const Accumulator<kGroups>& x, bool first,
                                              bool exactly) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const float a = x[0][j][0], b = x[0][j][1], c = x[1][j][0], d = x[1][j][1];
    float4* const at = reinterpret_cast<float4*>(to + j * 512);
    if (!first && !exactly) {
      ptx::red_add_v4(to + j * 512, a, b, c, d);
      continue;
    }
    float4 sum = make_float4(a, b, c, d);
    if (!first) {
      const float4 old = ptx::ld_cg(at);
      sum = make_float4(__fadd_rn(old.x, a), __fadd_rn(old.y, b), __fadd_rn(old.z, c),
                        __fadd_rn(old.w, d));
    }
    ptx::st_cg(at, sum);
  }
}

// By a whole warp: a share at `from` to the sums of a block when it is this tile's turn. empty: the
// barrier that says that it may be overwritten. rows: sums of the tile of dS whose share it is.
template <u32 kBytes, int kBlockM, class Rows>
__device__ __forceinline__ void add_share(const BackwardParams& params, i32 block_at, i32 turn,
                                          u32 from, u32 empty, const Rows& rows) {
  i32* const told = params.turns + block_at;
  if (turn > 0) {
    while (ptx::ld_relaxed_gpu(told) != turn) {
    }
    ptx::fence_acquire_gpu();
    ptx::fence_proxy_async_all();  // what was added before, or stored, comes before what we add
  }
  const bool first_lane = threadIdx.x % 32 == 0;
  if (first_lane) {
    float* const to = params.sums + static_cast<i64>(block_at) * (kBytes / 4);
    if (turn == 0) {
      ptx::bulk_store(to, from, kBytes);
    } else {
      ptx::bulk_add_f32(to, from, kBytes);
    }
    ptx::cp_async_bulk_commit_group();
  }
  if (Rows::kOn && rows.any)
    rows.add(params.row_sums + static_cast<i64>(block_at) * kBlockM, turn == 0);
  if (first_lane) {
    ptx::cp_async_bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(empty);
    ptx::cp_async_bulk_wait_group<0>();
  }
  if (Rows::kOn && rows.any) __syncwarp();
  if (first_lane) ptx::st_release_gpu(told, turn + 1);
  __syncwarp();
}

}  // namespace cuflash::sm90

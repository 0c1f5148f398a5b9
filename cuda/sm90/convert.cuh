// dQ out of its fp32 sums (sm90/sums.cuh), scaled and rounded: works behind the last tiles of keys,
// for CTAs that would be idle while others end.
#pragma once

#include "sm90/sums.cuh"
#include "tile/center.cuh"

namespace cuflash::sm90 {

// Parts of the sums of one conversion.
constexpr int kConvertParts = 24;

// By a whole CTA, whose warpgroups take parts in turn. S has kParts parts to a block of rows, each
// of kPartM queries by 64 columns. kCenter: less the sums of rows of dS times c of their kind.
template <class S, bool kFloatOut, bool kCenter>
struct Conversion {
  using Half = typename S::Half;
  static constexpr int kM = S::kPartM, kPitch = 64 + 4, kTile = kM * kPitch;
  // Floats beside a tile: c of each kind of row, the rows' sums and kinds.
  static constexpr int kRowSums = Kinds<kM>::kMost * 64, kBeside = kCenter ? kRowSums + 2 * kM : 0;
  // Parts share the columns of the head, or, if there are but 64, the queries.
  static constexpr bool kByQueries = kM < S::kBlockM;
  static constexpr int kBlocks = kConvertParts / S::kParts;  // of a conversion
  const BackwardParams& params;
  const i32 first, blocks;  // block of all heads, blocks of rows of a head
  const int mine, thread;   // warpgroup, thread in it

  __device__ __forceinline__ Conversion(const BackwardParams& params, i32 index)
      : params(params),
        first(index * kBlocks),
        blocks((params.band.n_q + S::kBlockM - 1) / S::kBlockM),
        mine(ptx::thread_index() / 128),
        thread(ptx::thread_index() % 128) {}

  // How many blocks there are.
  __device__ __forceinline__ i32 count() const {
    const i32 all =
        params.pieces / ((params.band.n_k + S::kBlockN - 1) / S::kBlockN) * params.group * blocks;
    return min(kBlocks, all - first);
  }

  // Waits until all tiles of keys have been added.
  __device__ __forceinline__ void wait() const {
    if (static_cast<int>(threadIdx.x) < count()) {
      const i32 block = first + threadIdx.x;
      const i32 all = turns_of<S::kBlockM, S::kBlockN>(params.band, block % blocks);
      while ((ptx::ld_relaxed_gpu(params.turns + block) & ~kSmall) != all) {
      }
      ptx::fence_acquire_gpu();
    }
    __syncthreads();
    ptx::fence_proxy_async_all();
  }

  __device__ __forceinline__ void load(float4 (&x)[kM / 8], i32 i) const {
    const i32 block = first + i / S::kParts;
    // Where no tile of keys has been added, there are no sums: these rows see nothing.
    const bool added = turns_of<S::kBlockM, S::kBlockN>(params.band, block % blocks) > 0;
    const float* from = params.sums +
                        (static_cast<i64>(block) * S::kParts + i % S::kParts) * (kM * 64) +
                        thread * 4;
#pragma unroll
    for (int j = 0; j < kM / 8; ++j)
      x[j] = added ? ptx::ld_cg(reinterpret_cast<const float4*>(from + j * 512))
                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // tile: 3 (kTile + kBeside) floats in shared memory.
  __device__ __forceinline__ void run(float* tile) const {
    static_assert(3 * (kTile + kBeside) * 4 <= S::kBarriers, "tiles fit");
    const i32 end = count() * S::kParts;
    tile += mine * (kTile + kBeside);
    const Place place = Place::of(thread);
    float* const to = tile + place.column * kPitch + place.key;
    float4 x[kM / 8];
    bool any = false;  // whether some row of the part is centred
    wait();
    if (mine < end) {
      load(x, mine);
      any = any_centered(mine);
    }
#pragma unroll 1
    for (i32 i = mine; i < end; i += kThreads / 128) {
      ptx::bar_sync(kWarpgroup + mine, 128);  // the part before has been written
      if (kCenter && any) prepare(tile + kTile, i);
#pragma unroll
      for (int j = 0; j < kM / 8; ++j) {
        to[j * 8 * kPitch] = x[j].x;
        to[(j * 8 + 1) * kPitch] = x[j].y;
        to[j * 8 * kPitch + 8] = x[j].z;
        to[(j * 8 + 1) * kPitch + 8] = x[j].w;
      }
      ptx::bar_sync(kWarpgroup + mine, 128);
      const bool here = any;
      if (i + kThreads / 128 < end) {
        load(x, i + kThreads / 128);
        any = any_centered(i + kThreads / 128);
      }
      write(tile, i, here);
    }
  }

  // Rows and columns of a part.
  struct At {
    i32 batch, head, row, column;
  };
  __device__ __forceinline__ At at(i32 i) const {
    const i32 block = first + i / S::kParts, part = i % S::kParts;
    const i32 flat_head = block / blocks;
    return {flat_head / params.heads, flat_head % params.heads,
            block % blocks * S::kBlockM + (kByQueries ? part * kM : 0), kByQueries ? 0 : part * 64};
  }

  __device__ __forceinline__ bool any_centered(i32 i) const {
    if constexpr (!kCenter) return false;
    const At here = at(i);
    return Centered::of(params, here.batch, here.head / params.group).template any<kM>(here.row);
  }

  // To shared memory: c of the kinds of rows of a part, and of its rows the sums of dS less dLSE.
  // Both are 0 for rows that are not centred, which then stay as they are.
  __device__ __forceinline__ void prepare(float* to, i32 i) const {
    const Band& band = params.band;
    const At here = at(i);
    const Kinds<kM> kinds(band, here.row, params.center);
    const Centered centered = Centered::of(params, here.batch, here.head / params.group);
    if (thread < kM) {
      const i32 row = here.row + thread;
      float r = 0.0f;
      if (row < band.n_q && centered.row(row)) {
        const i64 block = first + i / S::kParts;
        r = ptx::ld_cg(params.row_sums + block * S::kBlockM + row % S::kBlockM);
        const i64 head = here.batch * params.heads + here.head;
        if (params.dlse != nullptr) r = __fsub_rn(r, params.dlse[head * band.n_q + row]);
      }
      to[kRowSums + thread] = r;
      to[kRowSums + kM + thread] = __int_as_float(kinds.of(thread));
    }
    const int column = thread % 32 * 2;
    const u16* const k =
        params.k + params.k_strides.at(here.batch, here.head / params.group) + here.column + column;
#pragma unroll 1
    for (int kind = thread / 32; kind < kinds.count(); kind += 4) {
      const i32 row = here.row + kinds.row(kind);
      float2 c = make_float2(0.0f, 0.0f);
      if (row < band.n_q && centered.row(row) && here.column + column < params.d)
        c = Groups::of(band, row, params.center).mean<Half>(k, params.k_strides.row);
      *reinterpret_cast<float2*>(to + kind * 64 + column) = c;
    }
  }

  // A part from shared memory, whose rows are queries. any: some of them is centred.
  __device__ __forceinline__ void write(const float* tile, i32 i, bool any) const {
    const At here = at(i);
#pragma unroll 2
    for (int k = thread; k < kM * 8; k += 128) {
      const int m = k / 8, column = k % 8 * 8;
      if (here.row + m >= params.band.n_q || here.column + column >= params.d) continue;
      const float4 a = *reinterpret_cast<const float4*>(tile + m * kPitch + column),
                   b = *reinterpret_cast<const float4*>(tile + m * kPitch + column + 4);
      const i64 at =
          params.dq_strides.at(here.batch, here.head, here.row + m) + here.column + column;
      float4 less = make_float4(0.0f, 0.0f, 0.0f, 0.0f), less_b = less;
      float r = 0.0f;
      if (kCenter && any) {
        const float* const beside = tile + kTile;
        r = -beside[kRowSums + m];
        const float* const c = beside + __float_as_int(beside[kRowSums + kM + m]) * 64 + column;
        less = *reinterpret_cast<const float4*>(c);
        less_b = *reinterpret_cast<const float4*>(c + 4);
      }
      // The first share was stored, not added to 0: -0 + 0 is 0.
      auto out = [&](float y, float c) {
        y = __fadd_rn(y, 0.0f);
        if constexpr (kCenter) y = __fmaf_rn(r, c, y);  // y, if both are 0
        return __fmul_rn(y, params.scale);
      };
      const float4 x = make_float4(out(a.x, less.x), out(a.y, less.y), out(a.z, less.z),
                                   out(a.w, less.w)),
                   y = make_float4(out(b.x, less_b.x), out(b.y, less_b.y), out(b.z, less_b.z),
                                   out(b.w, less_b.w));
      if constexpr (kFloatOut) {
        float4* dq = reinterpret_cast<float4*>(static_cast<float*>(params.dq) + at);
        dq[0] = x;
        dq[1] = y;
      } else {
        *reinterpret_cast<uint4*>(static_cast<u16*>(params.dq) + at) = make_uint4(
            Half::pack(x.x, x.y), Half::pack(x.z, x.w), Half::pack(y.x, y.y), Half::pack(y.z, y.w));
      }
    }
  }
};

// By a whole CTA: conversions that nobody has taken, one after the other. at: two words in shared
// memory outside of `tile`; full: a barrier for one arrival, not used before.
template <class S, bool kFloatOut, bool kCenter>
__device__ __forceinline__ void convert(const BackwardParams& params, u32 at, u32 full,
                                        float* tile) {
  for (u32 turn = 0;; turn ^= 1) {
    if (threadIdx.x == 0) {
      ptx::st_shared(at + 4 * turn, atomicAdd(params.tickets + 1, 1));
      ptx::mbarrier_arrive(full);
    }
    ptx::mbarrier_wait(full, turn);
    const Conversion<S, kFloatOut, kCenter> conversion(params, load_alike(at + 4 * turn));
    if (conversion.count() <= 0) return;
    conversion.run(tile);
    __syncthreads();
  }
}

}  // namespace cuflash::sm90

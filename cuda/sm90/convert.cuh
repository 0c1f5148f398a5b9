// dQ out of its fp32 sums (sm90/sums.cuh), scaled and rounded: works behind the last tiles of keys,
// for CTAs that would be idle while others end.
#pragma once

#include "sm90/sums.cuh"

namespace cuflash::sm90 {

// Parts of the sums that a CTA converts.
constexpr int kConvertParts = 24;

// By a whole CTA, whose warpgroups take parts in turn. S has kParts parts to a block of rows, each
// of kPartM queries by 64 columns.
template <class S, bool kFloatOut>
struct Conversion {
  using Half = typename S::Half;
  static constexpr int kM = S::kPartM, kPitch = 64 + 4, kTile = kM * kPitch;
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

  // tile: 3 kTile floats in shared memory.
  __device__ __forceinline__ void run(float* tile) const {
    static_assert(3 * kTile * 4 <= S::kBytes, "tiles fit");
    const i32 end = count() * S::kParts;
    tile += mine * kTile;
    const Place place = Place::of(thread);
    float* const to = tile + place.column * kPitch + place.key;
    float4 x[kM / 8];
    wait();
    if (mine < end) load(x, mine);
#pragma unroll 1
    for (i32 i = mine; i < end; i += kThreads / 128) {
      ptx::bar_sync(kWarpgroup + mine, 128);  // the part before has been written
#pragma unroll
      for (int j = 0; j < kM / 8; ++j) {
        to[j * 8 * kPitch] = x[j].x;
        to[(j * 8 + 1) * kPitch] = x[j].y;
        to[j * 8 * kPitch + 8] = x[j].z;
        to[(j * 8 + 1) * kPitch + 8] = x[j].w;
      }
      ptx::bar_sync(kWarpgroup + mine, 128);
      if (i + kThreads / 128 < end) load(x, i + kThreads / 128);
      write(tile, i);
    }
  }

  // A part from shared memory, whose rows are queries.
  __device__ __forceinline__ void write(const float* tile, i32 i) const {
    const i32 block = first + i / S::kParts, part = i % S::kParts;
    const i32 flat_head = block / blocks;
    const i32 batch = flat_head / params.heads, head = flat_head % params.heads;
    // Parts share the columns of the head, or, if there are but 64, the queries.
    constexpr bool kByQueries = kM < S::kBlockM;
    const i32 first_row = block % blocks * S::kBlockM + (kByQueries ? part * kM : 0),
              first_column = kByQueries ? 0 : part * 64;
    // The first share was stored, not added to 0: -0 + 0 is 0.
    auto out = [&](float y) { return __fmul_rn(__fadd_rn(y, 0.0f), params.scale); };
#pragma unroll 2
    for (int k = thread; k < kM * 8; k += 128) {
      const int m = k / 8, column = k % 8 * 8;
      if (first_row + m >= params.band.n_q || first_column + column >= params.d) continue;
      const float4 a = *reinterpret_cast<const float4*>(tile + m * kPitch + column),
                   b = *reinterpret_cast<const float4*>(tile + m * kPitch + column + 4);
      const i64 at = params.dq_strides.at(batch, head, first_row + m) + first_column + column;
      if constexpr (kFloatOut) {
        float4* dq = reinterpret_cast<float4*>(static_cast<float*>(params.dq) + at);
        dq[0] = make_float4(out(a.x), out(a.y), out(a.z), out(a.w));
        dq[1] = make_float4(out(b.x), out(b.y), out(b.z), out(b.w));
      } else {
        *reinterpret_cast<uint4*>(static_cast<u16*>(params.dq) + at) =
            make_uint4(Half::pack(out(a.x), out(a.y)), Half::pack(out(a.z), out(a.w)),
                       Half::pack(out(b.x), out(b.y)), Half::pack(out(b.z), out(b.w)));
      }
    }
  }
};

}  // namespace cuflash::sm90

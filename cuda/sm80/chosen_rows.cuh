// Which rows of dQ are centred (emulation/center.py, has_large_mean): decided before the gradients,
// beside delta. A warp decides for 128 rows of a key head, most of which have their keys in common;
// all query heads of its group share it.
#pragma once

#include "ptx/special.cuh"
#include "tile/center.cuh"

namespace cuflash::sm80 {

constexpr int kRuleRows = 128;

// Whether the keys sampled of these groups have a large mean. keys: key 0. By a whole warp, a lane
// for four columns of 128 at a time.
template <class Half>
__device__ __forceinline__ bool has_large_mean(const Groups& groups, const u16* keys,
                                               i64 row_stride, i32 d) {
  float of_mean = 0.0f, of_keys = 0.0f;
#pragma unroll 1
  for (i32 column = threadIdx.x % 32 * 4; column < d; column += 128) {
    float total[4] = {}, size[4] = {};
#pragma unroll 8
    for (int t = 0; t < kSamples; ++t) {
      const uint2 x =
          *reinterpret_cast<const uint2*>(keys + groups.sample(t) * row_stride + column);
      const float of[4] = {low_half<Half>(x.x), high_half<Half>(x.x), low_half<Half>(x.y),
                           high_half<Half>(x.y)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[e] = __fadd_rn(total[e], of[e]);
        size[e] = __fmaf_rn(of[e], of[e], size[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      of_mean = __fmaf_rn(total[e], total[e], of_mean);
      of_keys = __fadd_rn(of_keys, size[e]);
    }
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    of_mean = __fadd_rn(of_mean, __shfl_xor_sync(0xffffffffu, of_mean, half));
    of_keys = __fadd_rn(of_keys, __shfl_xor_sync(0xffffffffu, of_keys, half));
  }
  return of_mean > __fmul_rn(kSamples * kThreshold, of_keys);
}

// By a warp: the bits of kRuleRows rows, the part-th so many of all heads.
template <class Half, class Params>
__device__ __forceinline__ void choose_rows(const Params& params, i32 part) {
  constexpr int kWords = kRuleRows / 32;
  if (part * kWords >= params.words) return;
  const i32 parts = params.pitch / kRuleRows, flat_head = part / parts,
            row = part % parts * kRuleRows;
  const u16* const keys =
      params.k + params.k_strides.at(flat_head / params.kv_heads, flat_head % params.kv_heads);
  const Kinds<kRuleRows> kinds(params.band, row, params.center);
  static_assert(Kinds<kRuleRows>::kMost <= 32, "a word has a bit for each kind");
  u32 large = 0;
#pragma unroll 1
  for (int kind = 0; kind < kinds.count(); ++kind) {
    const i32 first = row + kinds.row(kind);
    if (first >= params.band.n_q) break;
    const Groups groups = Groups::of(params.band, first, params.center);
    if (groups.length == 0) continue;
    if (has_large_mean<Half>(groups, keys, params.k_strides.row, params.d)) large |= 1u << kind;
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int m = 32 * w + threadIdx.x % 32;
    const bool mine = row + m < params.band.n_q && (large >> kinds.of(m) & 1) != 0;
    const u32 bits = __ballot_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) params.centered[part * kWords + w] = bits;
  }
}

}  // namespace cuflash::sm80

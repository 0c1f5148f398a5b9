// Which rows of dQ are centred (emulation/center.py, has_large_mean): decided before the gradients,
// beside delta. A warp decides for 32 rows of a key head; all query heads of its group share it.
#pragma once

#include "ptx/special.cuh"
#include "tile/center.cuh"

namespace cuflash::sm80 {

// Whether the keys sampled of these groups have a large mean. keys: key 0. By a whole warp.
template <class Half>
__device__ __forceinline__ bool has_large_mean(const Groups& groups, const u16* keys,
                                               i64 row_stride, i32 d) {
  float of_mean = 0.0f, of_keys = 0.0f;
#pragma unroll 1
  for (i32 n = threadIdx.x % 32; n < d; n += 32) {
    float total = 0.0f, size = 0.0f;
#pragma unroll 8
    for (int t = 0; t < kSamples; ++t) {
      const float x = low_half<Half>(keys[groups.sample(t) * row_stride + n]);
      total = __fadd_rn(total, x);
      size = __fmaf_rn(x, x, size);
    }
    of_mean = __fmaf_rn(total, total, of_mean);
    of_keys = __fadd_rn(of_keys, size);
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    of_mean = __fadd_rn(of_mean, __shfl_xor_sync(0xffffffffu, of_mean, half));
    of_keys = __fadd_rn(of_keys, __shfl_xor_sync(0xffffffffu, of_keys, half));
  }
  return of_mean > __fmul_rn(kSamples * kThreshold, of_keys);
}

// By a warp: the bits of 32 rows, number `word` of all heads.
template <class Half, class Params>
__device__ __forceinline__ void choose_rows(const Params& params, i32 word) {
  if (word >= params.words) return;
  const i32 words = params.pitch / 32, flat_head = word / words, row = word % words * 32;
  const u16* const keys =
      params.k + params.k_strides.at(flat_head / params.kv_heads, flat_head % params.kv_heads);
  const Kinds<32> kinds(params.band, row, params.center);
  u32 large = 0;  // a bit for each kind
#pragma unroll 1
  for (int kind = 0; kind < kinds.count(); ++kind) {
    const i32 first = row + kinds.row(kind);
    if (first >= params.band.n_q) break;
    const Groups groups = Groups::of(params.band, first, params.center);
    if (groups.length == 0) continue;
    if (has_large_mean<Half>(groups, keys, params.k_strides.row, params.d)) large |= 1u << kind;
  }
  const int lane = threadIdx.x % 32;
  const bool mine = row + lane < params.band.n_q && (large >> kinds.of(lane) & 1) != 0;
  const u32 bits = __ballot_sync(0xffffffffu, mine);
  if (lane == 0) params.centered[word] = bits;
}

}  // namespace cuflash::sm80

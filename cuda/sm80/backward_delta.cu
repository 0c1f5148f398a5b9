// First step of the backward: what a row of dS needs of its row, once. delta = rowsum(dO O) - dLSE,
// and LSE in log2 units. A thread sums a chunk of eight columns; the chunks are joined by halves,
// as in emulation/backward.py. Where dQ may be centred, more CTAs decide which rows are.
#include "sm80/chosen_rows.cuh"
#include "tile/gradient.cuh"

namespace cuflash::sm80 {

constexpr int kThreads = 128;

struct DeltaParams {
  const u16* dout;
  const void* out;
  const u16* rest;  // what O lost when it was rounded; null: delta of the rounded O
  const u16* k;
  const float *lse, *dlse;  // (batch, heads, n_q); dlse may be null
  float *lse2, *delta;      // (batch, heads, pitch), zeros behind n_q
  u32* centered;  // (batch * key heads, pitch / 32): a bit for each row; null without center
  Strides dout_strides, out_strides, rest_strides, k_strides;
  Band band;
  i32 batch, heads, n_q, d_v, pitch;
  i32 kv_heads, d, center;
  i32 words;      // of `centered`, of all heads
  i32 rule_ctas;  // that decide which rows are centred: first, since they wait for loads for long
};

// The halves of one 16-byte piece.
template <class Half>
__device__ __forceinline__ void load_chunk(float (&x)[8], const u16* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_half<Half>(w[i]);
    x[2 * i + 1] = high_half<Half>(w[i]);
  }
}

// kChunks: chunks of eight columns, rounded up to a power of two. kCenter: dQ may be centred.
template <class Half, int kChunks, bool kFloatOut, bool kCenter>
__global__ void __launch_bounds__(kThreads) delta(const __grid_constant__ DeltaParams params) {
  u32 block = blockIdx.x;
  if constexpr (kCenter) {
    if (block < static_cast<u32>(params.rule_ctas)) {
      choose_rows<Half>(params, block * (kThreads / 32) + threadIdx.x / 32);
      return;
    }
    block -= params.rule_ctas;
  }
  const i64 flat_row = static_cast<i64>(block) * (kThreads / kChunks) + threadIdx.x / kChunks;
  const i64 flat_head = flat_row / params.pitch;
  const i32 row = static_cast<i32>(flat_row % params.pitch);
  const i32 batch = static_cast<i32>(flat_head / params.heads),
            head = static_cast<i32>(flat_head % params.heads);
  const int column = threadIdx.x % kChunks * 8;
  const bool exists = batch < params.batch && row < params.n_q;

  float sum = 0.0f;
  if (exists && column < params.d_v) {
    float d[8], o[8], rest[8];
    load_chunk<Half>(d, params.dout + params.dout_strides.at(batch, head, row) + column);
    const i64 at = params.out_strides.at(batch, head, row) + column;
    if constexpr (kFloatOut) {
      const float* out = static_cast<const float*>(params.out) + at;
#pragma unroll
      for (int e = 0; e < 8; ++e) o[e] = out[e];
    } else {
      load_chunk<Half>(o, static_cast<const u16*>(params.out) + at);
    }
    const bool two_parts = params.rest != nullptr;
    if (two_parts)
      load_chunk<Half>(rest, params.rest + params.rest_strides.at(batch, head, row) + column);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sum = __fmaf_rn(d[e], o[e], sum);
      if (two_parts) sum = __fmaf_rn(d[e], rest[e], sum);
    }
  }
#pragma unroll
  for (int step = kChunks / 2; step > 0; step /= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));

  if (column != 0 || batch >= params.batch) return;
  float lse2 = 0.0f;
  if (exists) {
    const i64 at = flat_head * params.n_q + row;
    if (params.dlse != nullptr) sum = __fsub_rn(sum, params.dlse[at]);
    const float lse = params.lse[at];
    // A row that sees nothing has LSE -inf; its P is masked, whatever stands here: -0, by which
    // sm90/specials.cuh tells it.
    lse2 = lse == __int_as_float(0xff800000) ? -0.0f : __fmul_rn(lse, 1.44269502162933349609375f);
  }
  params.delta[flat_row] = sum;
  params.lse2[flat_row] = lse2;
}

}  // namespace cuflash::sm80

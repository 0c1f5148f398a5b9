// Last step of the Hopper backward: dQ from its fp32 sums (sm90/sums.cuh), scaled and rounded. A
// CTA takes one part: 64 columns of a head by kM queries of a block of rows.
#include "sm90/sums.cuh"

namespace cuflash::sm90 {

struct ConvertParams {
  void* dq;
  const float* sums;
  const i32* turns;
  Strides dq_strides;
  i32 heads, blocks, parts;  // of a batch entry; blocks of rows of a head; parts of a block
  i32 block_m;               // queries of a block
  i32 n_q, d;
  float scale;
};

template <class Half, int kM, bool kFloatOut>
__global__ void __launch_bounds__(128) convert(const __grid_constant__ ConvertParams params) {
  constexpr int kPitch = 64 + 4;
  __shared__ __align__(16) float tile[kM * kPitch];  // rows are queries
  const i32 block_at = blockIdx.x / params.parts, part = blockIdx.x % params.parts;
  const i32 flat_head = block_at / params.blocks, block = block_at % params.blocks;
  const i32 batch = flat_head / params.heads, head = flat_head % params.heads;
  const bool by_queries = kM < params.block_m;  // parts share the queries, not the columns
  const i32 first_row = block * params.block_m + (by_queries ? part * kM : 0),
            first_column = by_queries ? 0 : part * 64;
  const int thread = threadIdx.x;

  // Where no tile of keys has been added, there are no sums: these rows see nothing.
  const bool added = params.turns[block_at] != 0;
  const float4* from = reinterpret_cast<const float4*>(params.sums) +
                       static_cast<i64>(blockIdx.x) * (kM * 16) + thread;
  const Place place = Place::of(thread);
  float* to = tile + place.column * kPitch + place.key;
#pragma unroll
  for (int j = 0; j < kM / 8; ++j) {
    const float4 x = added ? from[j * 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    to[j * 8 * kPitch] = x.x;
    to[(j * 8 + 1) * kPitch] = x.y;
    to[j * 8 * kPitch + 8] = x.z;
    to[(j * 8 + 1) * kPitch + 8] = x.w;
  }
  __syncthreads();
  // The first share was stored, not added to 0: -0 + 0 is 0.
  auto out = [&](float x) { return __fmul_rn(__fadd_rn(x, 0.0f), params.scale); };
#pragma unroll 4
  for (int i = thread; i < kM * 8; i += 128) {
    const int m = i / 8, column = i % 8 * 8;
    if (first_row + m >= params.n_q || first_column + column >= params.d) continue;
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

}  // namespace cuflash::sm90

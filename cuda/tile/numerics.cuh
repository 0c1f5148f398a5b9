// The user's choices of arithmetic as types, and the half formats: what a kernel template is told.
#pragma once

#include "ptx/float.cuh"
#include "ptx/mma.cuh"

namespace cuflash {

enum class Reference { kRowMax, kPowerOfTwo, kStale, kLazy, kTieSafe, kFinal };
enum class Exp2 { kHardware, kPolynomial, kMixed };

// What changes the arithmetic of a kernel; mirrors emulation.Numerics.
template <Reference kReference_, bool kRoundedSum_, bool kSplit_, Exp2 kExp2_, bool kPromoted_>
struct Arithmetic {
  static constexpr Reference kReference = kReference_;
  static constexpr bool kRoundedSum = kRoundedSum_;  // l sums P as the product sees it
  static constexpr bool kSplit = kSplit_;            // P and dS as high + low half
  static constexpr Exp2 kExp2 = kExp2_;
  static constexpr bool kPromoted = kPromoted_;  // each tile from zero, added in fp32
};

struct Bf16 {
  static constexpr u32 kOnes = 0x3f803f80u;
  static constexpr u32 kExponent = 0x7f80u;  // all ones: NaN or Inf
  __device__ static u32 pack(float low, float high) { return ptx::cvt_rn_bf16x2(low, high); }
  __device__ static float widen(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
  __device__ static void mma(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], u32 b0,
                             u32 b1) {
    ptx::mma_m16n8k16_bf16(d0, d1, d2, d3, a, b0, b1);
  }
};

struct Fp16 {
  static constexpr u32 kOnes = 0x3c003c00u;
  static constexpr u32 kExponent = 0x7c00u;
  __device__ static u32 pack(float low, float high) { return ptx::cvt_rn_f16x2(low, high); }
  __device__ static float widen(u16 x) { return ptx::cvt_f32_f16(x); }
  __device__ static void mma(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], u32 b0,
                             u32 b1) {
    ptx::mma_m16n8k16_f16(d0, d1, d2, d3, a, b0, b1);
  }
};

template <class Half>
__device__ __forceinline__ float low_half(u32 x) {
  return Half::widen(static_cast<u16>(x & 0xffffu));
}

template <class Half>
__device__ __forceinline__ float high_half(u32 x) {
  return Half::widen(static_cast<u16>(x >> 16));
}

// The remainder that packing leaves: what p - half(p) is, packed again.
template <class Half>
__device__ __forceinline__ u32 pack_rest(float low, float high, u32 packed) {
  return Half::pack(__fsub_rn(low, low_half<Half>(packed)),
                    __fsub_rn(high, high_half<Half>(packed)));
}

// 2^x by a polynomial of degree 5 in FMAs; the coefficients are those of emulation/sfu.py.
__device__ __forceinline__ float exp2_polynomial(float x) {
  const float clamped = ptx::min_nan(ptx::max_nan(x, -127.0f), 128.0f);
  const float n = floorf(clamped);
  const float f = __fsub_rn(clamped, n);
  float p = 0.0018695347243919969f;
  p = __fmaf_rn(p, f, 0.009013495407998562f);
  p = __fmaf_rn(p, f, 0.05580100417137146f);
  p = __fmaf_rn(p, f, 0.24016466736793518f);
  p = __fmaf_rn(p, f, 0.6931512355804443f);
  p = __fmaf_rn(p, f, 1.0f);
  const float y = __int_as_float(__float_as_int(p) + (static_cast<i32>(n) << 23));
  return x != x ? x : (x < -126.0f ? 0.0f : y);
}

// 2^x of a probability in column group `group` (eight columns) of its tile.
template <Exp2 kExp2>
__device__ __forceinline__ float exp2_of(float x, int group) {
  if (kExp2 == Exp2::kPolynomial || (kExp2 == Exp2::kMixed && group % 4 == 0)) {
    return exp2_polynomial(x);
  }
  return ptx::ex2_approx_ftz(x);
}

// 2^x of a factor per row.
template <Exp2 kExp2>
__device__ __forceinline__ float exp2_factor(float x) {
  return kExp2 == Exp2::kPolynomial ? exp2_polynomial(x) : ptx::ex2_approx_ftz(x);
}

// tanh of a score, which `cap` brings into log2 units: 1 - 2 / (1 + 2^x), clamped where it is flat.
__device__ __forceinline__ float capped(float s, float cap) {
  const float x = ptx::min_nan(ptx::max_nan(__fmul_rn(s, cap), -30.0f), 30.0f);
  const float r = ptx::rcp_approx_ftz(__fadd_rn(ptx::ex2_approx_ftz(x), 1.0f));
  return __fmaf_rn(-2.0f, r, 1.0f);
}

}  // namespace cuflash

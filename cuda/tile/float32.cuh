// float32 operands on the tensor core: three bfloat16 terms each, six products, as in
// emulation/wide.py. A tile of terms is three tiles of halves, one behind the other: high, middle,
// low.
#pragma once

#include "ptx/special.cuh"
#include "tile/band.cuh"
#include "tile/layout.cuh"
#include "tile/numerics.cuh"

namespace cuflash {

// Terms of A and B in the order of their products.
constexpr int kProducts = 6;
__host__ __device__ constexpr int term_of_a(int product) {
  return product == 0 ? 2 : product == 2 || product == 3 ? 1 : 0;
}
__host__ __device__ constexpr int term_of_b(int product) {
  return product == 1 ? 2 : product == 2 || product == 4 ? 1 : 0;
}

// The terms of two neighbours, each pair packed. What would round to infinity is cut to the largest
// bfloat16; NaN and infinities leave a NaN in the low term.
__device__ __forceinline__ void split(u32 (&terms)[3], float x, float y) {
  const float top = __int_as_float(0x7f7f0000);
  terms[0] = Bf16::pack(fminf(fmaxf(x, -top), top), fminf(fmaxf(y, -top), top));
  x = __fsub_rn(x, low_half<Bf16>(terms[0]));
  y = __fsub_rn(y, high_half<Bf16>(terms[0]));
  terms[1] = Bf16::pack(x, y);
  terms[2] =
      Bf16::pack(__fsub_rn(x, low_half<Bf16>(terms[1])), __fsub_rn(y, high_half<Bf16>(terms[1])));
}

// One block of accumulators: rows warp * 16 + h * 8 + lane / 4 and columns j * 8 + lane % 4 * 2 +
// e, as [h][j][e].
template <int kGroups>
using Rows = float[2][kGroups][2];

// A operands made of accumulators, whose layout is the same.
template <int kSteps>
using Terms = u32[3][kSteps][4];

template <int kGroups>
__device__ __forceinline__ void split_rows(Terms<kGroups / 2>& a, const Rows<kGroups>& x) {
#pragma unroll
  for (int kk = 0; kk < kGroups / 2; ++kk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 terms[3];
      split(terms, x[i % 2][2 * kk + i / 2][0], x[i % 2][2 * kk + i / 2][1]);
#pragma unroll
      for (int t = 0; t < 3; ++t) a[t][kk][i] = terms[t];
    }
  }
}

// A tile of float32 in shared memory as it arrives; every thread later splits the pieces that it
// asked for itself, so that nobody else needs to wait for them. Four floats a piece; the map holds
// a byte for each.
template <class T>
struct Raw {
  static constexpr int kPieces = T::kCols / 4;
  static constexpr int kBytes = T::kRows * T::kCols * 4;
  static constexpr int kMapBytes = T::kRows * kPieces;
};

// Rows [first, first + kRows) of a matrix, one thread's share; rows outside [low, high) and columns
// past `cols` become 0.
template <class T, int kThreads>
__device__ __forceinline__ void load_raw(u32 to, const float* from, i64 row_stride, i32 first,
                                         i32 low, i32 high, i32 cols) {
  constexpr int kPieces = Raw<T>::kPieces;
  if constexpr (kThreads % kPieces == 0) {
    // A thread keeps its column: one address and one step, instead of one address per row.
    constexpr int kStep = kThreads / kPieces;
    const i32 column = ptx::thread_index() % kPieces * 4;
    i32 row = first + ptx::thread_index() / kPieces;
    const float* source = from + row * row_stride + column;
    to += ptx::thread_index() * 16;
#pragma unroll 2
    for (int i = 0; i < T::kRows; i += kStep) {
      if (T::kRows % kStep != 0 && row >= first + T::kRows) break;
      const bool valid = row >= low && row < high && column < cols;
      ptx::cp_async_16(to, valid ? source : from, valid);
      row += kStep;
      to += kThreads * 16;
      source += kStep * row_stride;
    }
  } else {
#pragma unroll 1
    for (int i = ptx::thread_index(); i < T::kRows * kPieces; i += kThreads) {
      const i32 row = first + i / kPieces, column = i % kPieces * 4;
      const bool valid = row >= low && row < high && column < cols;
      ptx::cp_async_16(to + i * 16, valid ? from + row * row_stride + column : from, valid);
    }
  }
}

template <class T>
__device__ __forceinline__ void store_terms(char* to, int i, const float4& x) {
  u32 low[3], high[3];
  split(low, x.x, x.y);
  split(high, x.z, x.w);
  to += i / Raw<T>::kPieces * T::kPitch + i % Raw<T>::kPieces * 8;
#pragma unroll
  for (int t = 0; t < 3; ++t)
    *reinterpret_cast<uint2*>(to + t * T::kBytes) = make_uint2(low[t], high[t]);
}

__device__ __forceinline__ bool is_special(float x) {
  return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}

// One thread's share of a tile, as it arrived, to terms; true if it held NaN or infinities, where
// kWatch asks.
template <class T, int kThreads, bool kWatch = false>
__device__ __forceinline__ bool split_tile(char* to, const char* raw) {
  bool found = false;
#pragma unroll 4
  for (int i = ptx::thread_index(); i < T::kRows * Raw<T>::kPieces; i += kThreads) {
    const float4 x = reinterpret_cast<const float4*>(raw)[i];
    if (kWatch) found |= is_special(x.x) || is_special(x.y) || is_special(x.z) || is_special(x.w);
    store_terms<T>(to, i, x);
  }
  return found;
}

// The same with NaN and infinities as zeros, and a bit for each in the map; true if there were any.
template <class T, int kThreads>
__device__ __forceinline__ bool split_clean_tile(char* to, const char* raw, unsigned char* map) {
  bool found = false;
#pragma unroll 1
  for (int i = ptx::thread_index(); i < T::kRows * Raw<T>::kPieces; i += kThreads) {
    float4 x = reinterpret_cast<const float4*>(raw)[i];
    u32 bits = 0;
    auto clean = [&](float& value, u32 bit) {
      if (!is_special(value)) return;
      bits |= bit;
      value = 0.0f;
    };
    clean(x.x, 1);
    clean(x.y, 2);
    clean(x.z, 4);
    clean(x.w, 8);
    map[i] = static_cast<unsigned char>(bits);
    found |= bits != 0;
    store_terms<T>(to, i, x);
  }
  return found;
}

// Zeros for the elements of a split tile that were NaN or infinities, for all threads.
template <class T, int kThreads>
__device__ __forceinline__ void clean_terms(char* tile) {
  __syncthreads();
#pragma unroll 1
  for (int i = ptx::thread_index(); i < T::kRows * T::kCols; i += kThreads) {
    u16* x = reinterpret_cast<u16*>(tile + i / T::kCols * T::kPitch + i % T::kCols * 2);
    u16* low = x + T::kBytes;  // two tiles on, in halves
    if ((*low & 0x7fffu) <= 0x7f80u) continue;
    *x = x[T::kBytes / 2] = *low = 0;
  }
  __syncthreads();
}

// Rows of a matrix straight to terms: for what a CTA loads once.
template <class T, int kThreads>
__device__ __forceinline__ void load_terms(char* to, const float* from, i64 row_stride, i32 first,
                                           i32 high, i32 cols) {
#pragma unroll 4
  for (int i = ptx::thread_index(); i < T::kRows * Raw<T>::kPieces; i += kThreads) {
    const i32 row = first + i / Raw<T>::kPieces, column = i % Raw<T>::kPieces * 4;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row < high && column < cols)
      x = *reinterpret_cast<const float4*>(from + row * row_stride + column);
    store_terms<T>(to, i, x);
  }
}

// d = A B^T from zero: this warp's rows of A, all rows of B. kSwapped: the order of products is
// that of B A^T.
template <class TA, class TB, bool kSwapped = false>
__device__ __forceinline__ void product(Rows<TB::kRows / 8>& d, u32 a_tile, u32 b_tile) {
  static_assert(TA::kCols == TB::kCols, "A and B share the axis that is summed");
  const int warp = ptx::thread_index() / 32;
#pragma unroll
  for (int i = 0; i < TB::kRows / 2; ++i) (&d[0][0][0])[i] = 0.0f;
#pragma unroll 1
  for (int n = 0; n < kProducts; ++n) {
    const u32 a_term = a_tile + (kSwapped ? term_of_b(n) : term_of_a(n)) * TA::kBytes;
    const u32 b_term = b_tile + (kSwapped ? term_of_a(n) : term_of_b(n)) * TB::kBytes;
#pragma unroll 4
    for (int kk = 0; kk < TA::kCols; kk += 16) {
      u32 a[4];
      ptx::ldmatrix_x4(a, a_address<TA>(a_term, warp * 16, kk));
#pragma unroll
      for (int j = 0; j < TB::kRows / 8; j += 2) {
        u32 b[4];
        ptx::ldmatrix_x4(b, b_address<TB>(b_term, j * 8, kk));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Bf16::mma(d[0][j + h][0], d[0][j + h][1], d[1][j + h][0], d[1][j + h][1], a, b[2 * h],
                    b[2 * h + 1]);
        }
      }
    }
  }
}

// acc += A B through the tensor core, B a tile stored [k][n].
template <class T>
__device__ __forceinline__ void accumulate(Rows<T::kCols / 8>& acc, const Terms<T::kRows / 16>& a,
                                           u32 b_tile) {
#pragma unroll
  for (int n = 0; n < kProducts; ++n) {
#pragma unroll
    for (int kk = 0; kk < T::kRows / 16; ++kk) {
#pragma unroll
      for (int j = 0; j < T::kCols / 8; j += 2) {
        u32 b[4];
        ptx::ldmatrix_x4_trans(b, bt_address<T>(b_tile + term_of_b(n) * T::kBytes, kk * 16, j * 8));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Bf16::mma(acc[0][j + h][0], acc[0][j + h][1], acc[1][j + h][0], acc[1][j + h][1],
                    a[term_of_a(n)][kk], b[2 * h], b[2 * h + 1]);
        }
      }
    }
  }
}

// acc = acc factor + A B, the product from zero: factor per row h.
template <class T>
__device__ __forceinline__ void add_product(Rows<T::kCols / 8>& acc, const Terms<T::kRows / 16>& a,
                                            u32 b_tile, const float (&factor)[2]) {
  constexpr int kWidth =
      T::kCols % 32 == 0 ? 4 : 2;  // n8 blocks at a time: chains that do not wait for each other
#pragma unroll
  for (int j = 0; j < T::kCols / 8; j += kWidth) {
    float d[kWidth][4] = {};
    // Loads of the next columns must not move up: accumulators would leave the registers.
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
#pragma unroll
      for (int kk = 0; kk < T::kRows / 16; ++kk) {
#pragma unroll
        for (int i = 0; i < kWidth; i += 2) {
          u32 b[4];
          ptx::ldmatrix_x4_trans(
              b, bt_address<T>(b_tile + term_of_b(n) * T::kBytes, kk * 16, (j + i) * 8));
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float (&x)[4] = d[i + h];
            Bf16::mma(x[0], x[1], x[2], x[3], a[term_of_a(n)][kk], b[2 * h], b[2 * h + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth * 4; ++i) {
      float& sum = acc[i / 2 % 2][j + i / 4][i % 2];
      sum = __fmaf_rn(sum, factor[i / 2 % 2], d[i / 4][i % 4]);
    }
  }
}

// NaN wherever A sees a place that the map marks: counted by a product of ones, for which B's tile
// makes room. sees(h, k): whether row h of this thread sees row k of B.
template <class T, int kThreads, class Sees>
__device__ __forceinline__ void mark_nan(Rows<T::kCols / 8>& acc, char* b_bytes, u32 b_tile,
                                         const unsigned char* map, const Sees& sees) {
  constexpr u32 kOne = 0x3f80u;
  constexpr int kPieces = Raw<T>::kPieces;
  __syncthreads();
#pragma unroll 1
  for (int i = ptx::thread_index(); i < T::kRows * kPieces; i += kThreads) {
    const u32 bits = map[i];
    const u32 low = (bits & 1 ? kOne : 0) | (bits & 2 ? kOne << 16 : 0);
    const u32 high = (bits & 4 ? kOne : 0) | (bits & 8 ? kOne << 16 : 0);
    *reinterpret_cast<uint2*>(b_bytes + i / kPieces * T::kPitch + i % kPieces * 8) =
        make_uint2(low, high);
  }
  __syncthreads();
  u32 a[T::kRows / 16][4];
#pragma unroll
  for (int kk = 0; kk < T::kRows / 16; ++kk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = kk * 16 + i / 2 * 8 + ptx::thread_index() % 4 * 2;
      a[kk][i] = (sees(i % 2, k) ? kOne : 0) | (sees(i % 2, k + 1) ? kOne << 16 : 0);
    }
  }
#pragma unroll
  for (int j = 0; j < T::kCols / 8; j += 2) {
    float d[2][4] = {};
#pragma unroll
    for (int kk = 0; kk < T::kRows / 16; ++kk) {
      u32 b[4];
      ptx::ldmatrix_x4_trans(b, bt_address<T>(b_tile, kk * 16, j * 8));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Bf16::mma(d[h][0], d[h][1], d[h][2], d[h][3], a[kk], b[2 * h], b[2 * h + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = acc[i / 2 % 2][j + i / 4][i % 2];
      if (d[i / 4][i % 4] > 0.0f) x = __int_as_float(0x7fffffff);
    }
  }
}

}  // namespace cuflash

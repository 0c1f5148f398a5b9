// Forward attention for any GPU since Ampere: mma.sync, cp.async, ldmatrix. One CTA of four warps
// takes kBlockM rows of one head and walks the tiles of keys from right to left; two CTAs share a
// multiprocessor. The arithmetic is that of emulation/tiled.py.
#include "tile/band.cuh"
#include "tile/layout.cuh"
#include "tile/nonfinite.cuh"
#include "tile/softmax.cuh"

namespace cuflash::sm80 {

struct ForwardParams {
  const u16 *q, *k, *v;
  void* out;
  u16* rest;   // what O lost when it was rounded, in the order of out; null if nobody asks
  float* lse;  // (batch, heads, n_q)
  Strides q_strides, k_strides, v_strides, out_strides, rest_strides;
  Band band;
  i32 heads, group;  // query heads, query heads per key head
  i32 d, d_v;
  float c;            // a score times c is in log2 units
  float cap;          // softcap: a score times cap is the argument of tanh
  float stale_limit;  // "stale": a lane's sum above this moves the reference
};

constexpr int kThreads = 128;

// kStages: tiles of K, and of V, in shared memory.
template <class Half_, int kD_, int kDv_, int kBlockM_, int kBlockN_, int kStages_>
struct Shape {
  using Half = Half_;
  static constexpr int kD = kD_, kDv = kDv_, kBlockM = kBlockM_, kBlockN = kBlockN_,
                       kStages = kStages_;
  static constexpr int kMmaRows = kBlockM / 64;  // m16 blocks of a warp
  static constexpr int kRows = 2 * kMmaRows;     // rows of a thread
  static constexpr int kGroups = kBlockN / 8;    // n8 blocks of a tile of scores
  // Loads between the products, where these take long enough to hide them one by one.
  static constexpr bool kSpread = kD > 64;
  using Q = Tile<kBlockM, kD>;
  using K = Tile<kBlockN, kD>;
  using V = Tile<kBlockN, kDv>;
};

// S = Q K^T of this warp's rows and one tile of keys, by this lane's addresses in both.
// between(i) is called before the i-th of kBetween equal parts of the products.
template <class S, int kBetween, class Between>
__device__ __forceinline__ void scores(float (&s)[S::kRows][S::kGroups][2], u32 q, u32 k,
                                       Between&& between) {
  using Half = typename S::Half;
#pragma unroll
  for (int i = 0; i < S::kRows; ++i) {
#pragma unroll
    for (int j = 0; j < S::kGroups; ++j) s[i][j][0] = s[i][j][1] = 0.0f;
  }
  // Fragments are loaded one step ahead of the products that use them.
  constexpr int kPairs = S::kGroups / 2, kSteps = S::kD / 16 * kPairs;
  u32 a[2][S::kMmaRows][4], b[2][4];
  auto load = [&](int step) {
    const int kk = step / kPairs, j = step % kPairs;
    if (j == 0) {
#pragma unroll
      for (int mi = 0; mi < S::kMmaRows; ++mi) {
        ptx::ldmatrix_x4(a[kk % 2][mi], q + mi * 64 * S::Q::kPitch + kk * 32);
      }
    }
    ptx::ldmatrix_x4(b[step % 2], k + j * 16 * S::K::kPitch + kk * 32);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
#pragma unroll
    for (int i = 0; i < kBetween; ++i) {
      if (i * kSteps / kBetween == step) between(i);
    }
    const int kk = step / kPairs, j = step % kPairs * 2;
#pragma unroll
    for (int mi = 0; mi < S::kMmaRows; ++mi) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Half::mma(s[2 * mi][j + h][0], s[2 * mi][j + h][1], s[2 * mi + 1][j + h][0],
                  s[2 * mi + 1][j + h][1], a[kk % 2][mi], b[step % 2][2 * h],
                  b[step % 2][2 * h + 1]);
      }
    }
  }
}

// The A operand of k16 step kk: P rounded to halves, or (part 1) what that rounding left.
template <class S>
__device__ __forceinline__ void pack_p(u32 (&a)[4], const float (&p)[S::kRows][S::kGroups][2],
                                       int mi, int kk, int part) {
  using Half = typename S::Half;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = p[2 * mi + i % 2][2 * kk + i / 2][0],
                high = p[2 * mi + i % 2][2 * kk + i / 2][1];
    a[i] = Half::pack(low, high);
    if (part == 1) a[i] = pack_rest<Half>(low, high, a[i]);
  }
}

// o += P V of one tile (and w += P 1, the row sum that the product sees).
template <class S, class A>
__device__ __forceinline__ void accumulate(float (&o)[S::kRows][S::kDv / 8][2],
                                           float (&w)[S::kRows][2],
                                           const float (&p)[S::kRows][S::kGroups][2], u32 v) {
  using Half = typename S::Half;
#pragma unroll
  for (int i = 0; i < S::kRows; ++i)
    w[i][1] = w[i][0];  // all columns are equal: one lives between tiles
  constexpr int kPairs = S::kDv / 16, kDepth = S::kBlockN / 16,
                kSteps = (A::kSplit ? 2 : 1) * kDepth * kPairs;
  u32 a[S::kMmaRows][4], b[2][4];
  auto load = [&](int step) {
    const int kk = step / kPairs % kDepth, j = step % kPairs;
    ptx::ldmatrix_x4_trans(b[step % 2], v + kk * 16 * S::V::kPitch + j * 32);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
    const int part = step / kPairs / kDepth, kk = step / kPairs % kDepth, j = step % kPairs * 2;
#pragma unroll
    for (int mi = 0; mi < S::kMmaRows; ++mi) {
      if (j == 0) {
        pack_p<S>(a[mi], p, mi, kk, part);
        if constexpr (A::kRoundedSum) {
          Half::mma(w[2 * mi][0], w[2 * mi][1], w[2 * mi + 1][0], w[2 * mi + 1][1], a[mi],
                    Half::kOnes, Half::kOnes);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Half::mma(o[2 * mi][j + h][0], o[2 * mi][j + h][1], o[2 * mi + 1][j + h][0],
                  o[2 * mi + 1][j + h][1], a[mi], b[step % 2][2 * h], b[step % 2][2 * h + 1]);
      }
    }
  }
}

// o = o alpha + P V of one tile, the product from zero: for Arithmetic::kPromoted.
template <class S, class A>
__device__ __forceinline__ void accumulate_promoted(float (&o)[S::kRows][S::kDv / 8][2],
                                                    float (&w)[S::kRows][2],
                                                    const float (&alpha)[S::kRows],
                                                    const float (&p)[S::kRows][S::kGroups][2],
                                                    u32 v) {
  using Half = typename S::Half;
#pragma unroll
  for (int mi = 0; mi < S::kMmaRows; ++mi) {
#pragma unroll
    for (int j = 0; j <= S::kDv / 8; ++j) {  // the last round is the row sum
      if (j == S::kDv / 8 && !A::kRoundedSum) continue;
      float tile[4] = {};
#pragma unroll
      for (int part = 0; part < (A::kSplit ? 2 : 1); ++part) {
#pragma unroll
        for (int kk = 0; kk < S::kBlockN / 16; ++kk) {
          u32 a[4], b[4] = {Half::kOnes, Half::kOnes, Half::kOnes, Half::kOnes};
          pack_p<S>(a, p, mi, kk, part);
          if (j < S::kDv / 8) ptx::ldmatrix_x4_trans(b, v + kk * 16 * S::V::kPitch + j / 2 * 32);
          Half::mma(tile[0], tile[1], tile[2], tile[3], a, b[j % 2 * 2], b[j % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * mi + i / 2;
        float& sum = j < S::kDv / 8 ? o[row][j % (S::kDv / 8)][i % 2] : w[row][i % 2];
        sum = __fmaf_rn(sum, alpha[row], tile[i]);
      }
    }
  }
}

// Gives rows the NaN and Inf of V that they see in partly masked tiles, where products ran on zeros
// in their place: keys outside [full_begin, full_end). Works on the stored output, when nothing is
// in registers any more. (Under a weight that underflowed to zero, too: there the product would be
// NaN.)
template <class S, bool kFloatOut>
__device__ __forceinline__ void add_specials(const ForwardParams& params, i32 first_row,
                                             i32 last_row, i32 full_begin, i32 full_end) {
  using Half = typename S::Half;
  __syncthreads();
  const Band& band = params.band;
  const i32 blocks = (band.n_q + S::kBlockM - 1) / S::kBlockM,
            flat_head = ptx::block_index() / blocks;
  const i32 batch = flat_head / params.heads, head = flat_head % params.heads;
  const u16* v = params.v + params.v_strides.at(batch, head / params.group, 0);
#pragma unroll 1
  for (i32 i = threadIdx.x; i < (last_row - first_row + 1) * params.d_v; i += kThreads) {
    const i32 row = first_row + i / params.d_v, column = i % params.d_v;
    const float special =
        visible_special<Half>(band, v + column, params.v_strides.row, row, full_begin, full_end);
    if (special == 0.0f) continue;
    const i64 at = params.out_strides.at(batch, head, row) + column;
    if constexpr (kFloatOut) {
      float* out = static_cast<float*>(params.out) + at;
      *out = __fadd_rn(*out, special);
    } else {
      u16* out = static_cast<u16*>(params.out) + at;
      *out = static_cast<u16>(Half::pack(__fadd_rn(Half::widen(*out), special), 0.0f));
      if (params.rest != nullptr) {
        params.rest[params.rest_strides.at(batch, head, row) + column] = 0x7fff;  // Inf - Inf
      }
    }
  }
}

template <class S, class A, bool kSoftcap, bool kFloatOut>
__global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ ForwardParams params) {
  using Half = typename S::Half;
  constexpr int kRows = S::kRows, kGroups = S::kGroups, kBlockN = S::kBlockN;
  extern __shared__ __align__(16) char shared[];
  const u32 q_tile = ptx::shared_address(shared), k_tiles = q_tile + S::Q::kBytes,
            v_tiles = k_tiles + S::kStages * S::K::kBytes;
  const int g = threadIdx.x % 4;

  // Late rows first: under a causal mask they have the most tiles.
  const Band& band = params.band;
  const i32 blocks = (band.n_q + S::kBlockM - 1) / S::kBlockM;
  const i32 block = blocks - 1 - static_cast<i32>(blockIdx.x % blocks);
  const i32 batch = blockIdx.x / blocks / params.heads, head = blockIdx.x / blocks % params.heads;
  const i32 first_row = block * S::kBlockM, last_row = min(first_row + S::kBlockM, band.n_q) - 1;
  const u16* q = params.q + params.q_strides.at(batch, head, 0);
  const u16* k = params.k + params.k_strides.at(batch, head / params.group, 0);
  const u16* v = params.v + params.v_strides.at(batch, head / params.group, 0);

  // Keys that some row of this CTA sees; others are loaded as zeros, whatever they hold.
  const i32 key_low = band.low(first_row), key_high = band.high(last_row);
  const i32 tile_begin = key_low / kBlockN,
            tile_end = key_high > key_low ? (key_high + kBlockN - 1) / kBlockN : 0;
  // Tiles that every row of the CTA sees whole.
  const i32 full_begin = (band.low(last_row) + kBlockN - 1) / kBlockN,
            full_end = band.high(first_row) / kBlockN;
  // Row of this thread's i-th row state; from a fresh thread index, so that nothing stays in
  // registers for it.
  auto row_of = [&](int i) -> i32 {
    const i32 thread = ptx::thread_index();
    return first_row + i / 2 * 64 + thread / 32 * 16 + i % 2 * 8 + thread % 32 / 4;
  };

  const u32 q_lane = ptx::kept(a_address<typename S::Q>(q_tile, threadIdx.x / 32 * 16, 0));
  const u32 k_lane = ptx::kept(b_address<typename S::K>(k_tiles, 0, 0));
  const u32 v_lane = ptx::kept(bt_address<typename S::V>(v_tiles, 0, 0));
  using LoadK = TileLoad<typename S::K, kThreads>;
  using LoadV = TileLoad<typename S::V, kThreads>;
  auto load_k = [&](i32 tile) {
    return LoadK(k_tiles + (tile & (S::kStages - 1)) * S::K::kBytes, k, params.k_strides.row,
                 tile * kBlockN, key_low, key_high, params.d, tile >= tile_begin);
  };
  auto load_v = [&](i32 tile) {
    return LoadV(v_tiles + (tile & (S::kStages - 1)) * S::V::kBytes, v, params.v_strides.row,
                 tile * kBlockN, key_low, key_high, params.d_v, tile >= tile_begin);
  };
  // What was loaded has arrived, and every warp is done with what will be replaced.
  auto synchronise = [&]() {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
  };
  auto k_lane_of = [&](i32 tile) -> u32 {
    return k_lane + (tile & (S::kStages - 1)) * S::K::kBytes;
  };
  auto cap = [&](float (&s)[kRows][kGroups][2]) {
    if constexpr (kSoftcap) {
#pragma unroll
      for (int i = 0; i < kRows * kGroups * 2; ++i)
        (&s[0][0][0])[i] = capped((&s[0][0][0])[i], params.cap);
    }
  };
  // -inf where not seen. Bounds count from this thread's first row and key; both sides of the band
  // are rarely in one tile.
  auto mask = [&](float (&s)[kRows][kGroups][2], i32 tile) {
    if (tile < full_begin) {
      const i32 low = band.low_from(row_of(0), tile * kBlockN + g * 2);
#pragma unroll
      for (int i = 0; i < kRows * kGroups * 2; ++i) {
        const int r = i / (kGroups * 2), column = i % (kGroups * 2) / 2 * 8 + i % 2;
        if (column - (r / 2 * 64 + r % 2 * 8) < low)
          s[r][i % (kGroups * 2) / 2][i % 2] = negative_infinity();
      }
    }
    if (tile >= full_end) {
      const i32 key = tile * kBlockN + g * 2;
      const i32 first = band.high_from(row_of(0), key), end = band.n_k - key;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const i32 high = min(first + i / 2 * 64 + i % 2 * 8, end);
#pragma unroll
        for (int j = 0; j < kGroups * 2; ++j) {
          if (j / 2 * 8 + j % 2 >= high) s[i][j / 2][j % 2] = negative_infinity();
        }
      }
    }
  };

  // Whether V of a tile that some row does not see whole held NaN or Inf; in the padding of Q's
  // first row.
  u32* found = reinterpret_cast<u32*>(shared + S::kD * 2);
  if (threadIdx.x == 0) *found = 0;
  RowState state[kRows];
  float o[kRows][S::kDv / 8][2], w[kRows][2], s[kRows][kGroups][2];

  // NaN in O may come from NaN or Inf in V behind the mask, where the weight is 0: then all is done
  // again, carefully.
#pragma unroll 1
  for (bool careful = false;; careful = true) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      state[i] = RowState{};
      w[i][0] = 0.0f;
#pragma unroll
      for (int j = 0; j < S::kDv / 8; ++j) o[i][j][0] = o[i][j][1] = 0.0f;
    }
    if (tile_end > tile_begin && !careful) {
      load_tile<typename S::Q, kThreads>(q_tile, q, params.q_strides.row, first_row, 0, band.n_q,
                                         params.d);
    }
    if constexpr (A::kReference == Reference::kFinal) {
      // A first pass for the exact max of every row.
      for (i32 tile = tile_end - 1; tile >= tile_begin; --tile) {
        load_k(tile).all();
        synchronise();
        scores<S, 1>(s, q_lane, k_lane_of(tile), [](int) {});
        cap(s);
        mask(s, tile);
        float top[kRows];
        thread_max(top, s);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          state[i].r = fmaxf(state[i].r, __fmul_rn(quad_max(top[i]), params.c));
        __syncthreads();
      }
    }
    load_k(tile_end - 1).all();
    if constexpr (S::kStages == 2) load_v(tile_end - 1).all();

#pragma unroll 1
    for (i32 tile = tile_end - 1; tile >= tile_begin; --tile) {
      synchronise();
      if constexpr (S::kStages == 2) {
        auto next_k = load_k(tile - 1);
        auto next_v = load_v(tile - 1);
        if constexpr (S::kSpread) {
          // A piece of each at a time: their reads of shared memory are kept waiting less often.
          constexpr int kPieces = LoadK::kPieces > LoadV::kPieces ? LoadK::kPieces : LoadV::kPieces;
          scores<S, kPieces>(s, q_lane, k_lane_of(tile), [&](int i) {
            if (i < LoadK::kPieces) next_k.piece(i);
            if (i < LoadV::kPieces) next_v.piece(i);
          });
        } else {
          next_k.all();
          next_v.all();
          scores<S, 1>(s, q_lane, k_lane_of(tile), [](int) {});
        }
      } else {
        auto own_v = load_v(tile);
        scores<S, LoadV::kPieces>(s, q_lane, k_lane_of(tile), [&](int i) { own_v.piece(i); });
        synchronise();
        load_k(tile - 1).all();
      }

      cap(s);
      mask(s, tile);
      float alpha[kRows];
      softmax<A>(state, s, alpha, params.c, params.stale_limit);
      if constexpr (!A::kPromoted) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          // A short row of O is faster scaled than asked about.
          if (S::kDv > 64 && !__any_sync(0xffffffffu, alpha[i] != 1.0f)) continue;
#pragma unroll
          for (int j = 0; j < S::kDv / 8; ++j) {
            o[i][j][0] = __fmul_rn(o[i][j][0], alpha[i]);
            o[i][j][1] = __fmul_rn(o[i][j][1], alpha[i]);
          }
          w[i][0] = __fmul_rn(w[i][0], alpha[i]);
        }
      }

      if (careful && (tile < full_begin || tile >= full_end)) {
        char* bytes = shared + (v_tiles - q_tile) + (tile & (S::kStages - 1)) * S::V::kBytes;
        if (zero_nonfinite<Half, typename S::V, kThreads>(bytes)) *found = 1;
        __syncthreads();
      }
      const u32 v_tile = v_lane + (tile & (S::kStages - 1)) * S::V::kBytes;
      if constexpr (A::kPromoted) {
        accumulate_promoted<S, A>(o, w, alpha, s, v_tile);
      } else {
        accumulate<S, A>(o, w, s, v_tile);
      }
    }

    float sum[kRows] = {};
#pragma unroll
    for (int j = 0; j < S::kDv / 4; ++j) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum[i] = __fmaf_rn(o[i][j / 2][j % 2], 0.0f, sum[i]);
    }
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) finite &= sum[i] == 0.0f;
    const bool whole = full_begin <= tile_begin && full_end >= tile_end;
    if (!__syncthreads_or(!finite) || whole || careful) break;
  }

  // O in halves leaves through this warp's rows of Q in shared memory, in whole 16-byte pieces.
  constexpr bool kStaged = !kFloatOut && S::kDv <= S::kD;
  const i32 flat_head = ptx::block_index() / blocks;
  const i32 out_batch = flat_head / params.heads, out_head = flat_head % params.heads;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const i32 row = row_of(i);
    const float l = quad_sum(state[i].l);
    const bool sees = band.high(row) > band.low(row);
    const float inverse = sees ? __frcp_rn(A::kRoundedSum ? w[i][0] : l) : 0.0f;
    if (g == 0 && row < band.n_q) {
      const float lse =
          __fmul_rn(__fadd_rn(state[i].r, ptx::lg2_approx_ftz(l)), 0.693147182464599609375f);
      params.lse[static_cast<i64>(flat_head) * band.n_q + row] = sees ? lse : negative_infinity();
    }
    if constexpr (kStaged) {
#pragma unroll
      for (int j = 0; j < S::kDv / 8; ++j) {
        *reinterpret_cast<u32*>(shared + (row - first_row) * S::Q::kPitch + j * 16 + g * 4) =
            Half::pack(__fmul_rn(o[i][j][0], inverse), __fmul_rn(o[i][j][1], inverse));
      }
    }
    if ((kStaged && params.rest == nullptr) || row >= band.n_q) continue;
    const i64 at = params.out_strides.at(out_batch, out_head, row);
    const i64 rest_at = params.rest_strides.at(out_batch, out_head, row);
#pragma unroll
    for (int j = 0; j < S::kDv / 8; ++j) {
      const int column = j * 8 + g * 2;
      if (column >= params.d_v) continue;
      const float x = __fmul_rn(o[i][j][0], inverse), y = __fmul_rn(o[i][j][1], inverse);
      if constexpr (kFloatOut) {
        float* out = static_cast<float*>(params.out) + at + column;
        out[0] = x;
        out[1] = y;
      } else {
        const u32 packed = Half::pack(x, y);
        if constexpr (!kStaged)
          *reinterpret_cast<u32*>(static_cast<u16*>(params.out) + at + column) = packed;
        if (params.rest != nullptr)
          *reinterpret_cast<u32*>(params.rest + rest_at + column) = pack_rest<Half>(x, y, packed);
      }
    }
  }
  if constexpr (kStaged) {
    __syncwarp();
    constexpr int kChunks = S::kDv / 8;
    const i32 thread = ptx::thread_index();
#pragma unroll 4
    for (int i = thread % 32; i < S::kMmaRows * 16 * kChunks; i += 32) {
      const int chunk = i % kChunks, row_of_warp = i / kChunks;
      const int local = row_of_warp / 16 * 64 + thread / 32 * 16 + row_of_warp % 16;
      const i32 row = first_row + local;
      if (row >= band.n_q || chunk * 8 >= params.d_v) continue;
      u16* out = static_cast<u16*>(params.out) + params.out_strides.at(out_batch, out_head, row);
      *reinterpret_cast<uint4*>(out + chunk * 8) =
          *reinterpret_cast<const uint4*>(shared + local * S::Q::kPitch + chunk * 16);
    }
  }
  __syncthreads();
  if (*found != 0) {
    add_specials<S, kFloatOut>(params, first_row, last_row, full_begin * kBlockN,
                               full_end * kBlockN);
  }
}

}  // namespace cuflash::sm80

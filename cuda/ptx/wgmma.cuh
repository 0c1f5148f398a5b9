// wgmma.mma_async m64nNk16: d (+)= a b^T by the four warps of a warpgroup, fp32 accumulate, b and
// maybe a read from shared memory. A thread's accumulators are d[h][j][e]: row 8 h + lane / 4 of
// its warp's sixteen, column 8 j + lane % 4 * 2 + e, as those of mma.sync.
#pragma once

#include "ptx/types.cuh"

namespace cuflash::ptx {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Keeps what touches these registers on its side of the asynchronous products.
template <int kGroups>
__device__ __forceinline__ void fence_operands(float (&d)[2][kGroups][2]) {
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) asm volatile("" : "+f"((&d[0][0][0])[i])::"memory");
}

template <int kSteps>
__device__ __forceinline__ void fence_operands(u32 (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Accumulators of 8 N columns as text and as operands.
#define CUFLASH_TEXT_8 "%0,%1,%2,%3"
#define CUFLASH_TEXT_16 CUFLASH_TEXT_8 ",%4,%5,%6,%7"
#define CUFLASH_TEXT_24 CUFLASH_TEXT_16 ",%8,%9,%10,%11"
#define CUFLASH_TEXT_32 CUFLASH_TEXT_24 ",%12,%13,%14,%15"
#define CUFLASH_TEXT_40 CUFLASH_TEXT_32 ",%16,%17,%18,%19"
#define CUFLASH_TEXT_48 CUFLASH_TEXT_40 ",%20,%21,%22,%23"
#define CUFLASH_TEXT_56 CUFLASH_TEXT_48 ",%24,%25,%26,%27"
#define CUFLASH_TEXT_64 CUFLASH_TEXT_56 ",%28,%29,%30,%31"
#define CUFLASH_TEXT_72 CUFLASH_TEXT_64 ",%32,%33,%34,%35"
#define CUFLASH_TEXT_80 CUFLASH_TEXT_72 ",%36,%37,%38,%39"
#define CUFLASH_TEXT_88 CUFLASH_TEXT_80 ",%40,%41,%42,%43"
#define CUFLASH_TEXT_96 CUFLASH_TEXT_88 ",%44,%45,%46,%47"
#define CUFLASH_TEXT_104 CUFLASH_TEXT_96 ",%48,%49,%50,%51"
#define CUFLASH_TEXT_112 CUFLASH_TEXT_104 ",%52,%53,%54,%55"
#define CUFLASH_TEXT_120 CUFLASH_TEXT_112 ",%56,%57,%58,%59"
#define CUFLASH_TEXT_128 CUFLASH_TEXT_120 ",%60,%61,%62,%63"
#define CUFLASH_TEXT_136 CUFLASH_TEXT_128 ",%64,%65,%66,%67"
#define CUFLASH_TEXT_144 CUFLASH_TEXT_136 ",%68,%69,%70,%71"
#define CUFLASH_TEXT_152 CUFLASH_TEXT_144 ",%72,%73,%74,%75"
#define CUFLASH_TEXT_160 CUFLASH_TEXT_152 ",%76,%77,%78,%79"
#define CUFLASH_TEXT_168 CUFLASH_TEXT_160 ",%80,%81,%82,%83"
#define CUFLASH_TEXT_176 CUFLASH_TEXT_168 ",%84,%85,%86,%87"
#define CUFLASH_TEXT_184 CUFLASH_TEXT_176 ",%88,%89,%90,%91"
#define CUFLASH_TEXT_192 CUFLASH_TEXT_184 ",%92,%93,%94,%95"
#define CUFLASH_TEXT_200 CUFLASH_TEXT_192 ",%96,%97,%98,%99"
#define CUFLASH_TEXT_208 CUFLASH_TEXT_200 ",%100,%101,%102,%103"
#define CUFLASH_TEXT_216 CUFLASH_TEXT_208 ",%104,%105,%106,%107"
#define CUFLASH_TEXT_224 CUFLASH_TEXT_216 ",%108,%109,%110,%111"
#define CUFLASH_TEXT_232 CUFLASH_TEXT_224 ",%112,%113,%114,%115"
#define CUFLASH_TEXT_240 CUFLASH_TEXT_232 ",%116,%117,%118,%119"
#define CUFLASH_TEXT_248 CUFLASH_TEXT_240 ",%120,%121,%122,%123"
#define CUFLASH_TEXT_256 CUFLASH_TEXT_248 ",%124,%125,%126,%127"
#define CUFLASH_GROUP(j)                                                           \
  "+f"(d[0][kFirst + j][0]), "+f"(d[0][kFirst + j][1]), "+f"(d[1][kFirst + j][0]), \
      "+f"(d[1][kFirst + j][1])
#define CUFLASH_OPERANDS_8 CUFLASH_GROUP(0)
#define CUFLASH_OPERANDS_16 CUFLASH_OPERANDS_8, CUFLASH_GROUP(1)
#define CUFLASH_OPERANDS_24 CUFLASH_OPERANDS_16, CUFLASH_GROUP(2)
#define CUFLASH_OPERANDS_32 CUFLASH_OPERANDS_24, CUFLASH_GROUP(3)
#define CUFLASH_OPERANDS_40 CUFLASH_OPERANDS_32, CUFLASH_GROUP(4)
#define CUFLASH_OPERANDS_48 CUFLASH_OPERANDS_40, CUFLASH_GROUP(5)
#define CUFLASH_OPERANDS_56 CUFLASH_OPERANDS_48, CUFLASH_GROUP(6)
#define CUFLASH_OPERANDS_64 CUFLASH_OPERANDS_56, CUFLASH_GROUP(7)
#define CUFLASH_OPERANDS_72 CUFLASH_OPERANDS_64, CUFLASH_GROUP(8)
#define CUFLASH_OPERANDS_80 CUFLASH_OPERANDS_72, CUFLASH_GROUP(9)
#define CUFLASH_OPERANDS_88 CUFLASH_OPERANDS_80, CUFLASH_GROUP(10)
#define CUFLASH_OPERANDS_96 CUFLASH_OPERANDS_88, CUFLASH_GROUP(11)
#define CUFLASH_OPERANDS_104 CUFLASH_OPERANDS_96, CUFLASH_GROUP(12)
#define CUFLASH_OPERANDS_112 CUFLASH_OPERANDS_104, CUFLASH_GROUP(13)
#define CUFLASH_OPERANDS_120 CUFLASH_OPERANDS_112, CUFLASH_GROUP(14)
#define CUFLASH_OPERANDS_128 CUFLASH_OPERANDS_120, CUFLASH_GROUP(15)
#define CUFLASH_OPERANDS_136 CUFLASH_OPERANDS_128, CUFLASH_GROUP(16)
#define CUFLASH_OPERANDS_144 CUFLASH_OPERANDS_136, CUFLASH_GROUP(17)
#define CUFLASH_OPERANDS_152 CUFLASH_OPERANDS_144, CUFLASH_GROUP(18)
#define CUFLASH_OPERANDS_160 CUFLASH_OPERANDS_152, CUFLASH_GROUP(19)
#define CUFLASH_OPERANDS_168 CUFLASH_OPERANDS_160, CUFLASH_GROUP(20)
#define CUFLASH_OPERANDS_176 CUFLASH_OPERANDS_168, CUFLASH_GROUP(21)
#define CUFLASH_OPERANDS_184 CUFLASH_OPERANDS_176, CUFLASH_GROUP(22)
#define CUFLASH_OPERANDS_192 CUFLASH_OPERANDS_184, CUFLASH_GROUP(23)
#define CUFLASH_OPERANDS_200 CUFLASH_OPERANDS_192, CUFLASH_GROUP(24)
#define CUFLASH_OPERANDS_208 CUFLASH_OPERANDS_200, CUFLASH_GROUP(25)
#define CUFLASH_OPERANDS_216 CUFLASH_OPERANDS_208, CUFLASH_GROUP(26)
#define CUFLASH_OPERANDS_224 CUFLASH_OPERANDS_216, CUFLASH_GROUP(27)
#define CUFLASH_OPERANDS_232 CUFLASH_OPERANDS_224, CUFLASH_GROUP(28)
#define CUFLASH_OPERANDS_240 CUFLASH_OPERANDS_232, CUFLASH_GROUP(29)
#define CUFLASH_OPERANDS_248 CUFLASH_OPERANDS_240, CUFLASH_GROUP(30)
#define CUFLASH_OPERANDS_256 CUFLASH_OPERANDS_248, CUFLASH_GROUP(31)

// ss: a and b K-major in shared memory, from zero unless `add`; ss_as: with a stored [k][m] and b
// stored [k][n] where it says so. rs: a in registers, b stored [k][n]. The groups of columns
// kFirst, kFirst + 1, ... of d are the product's.
template <int kN>
struct Wgmma;

#define CUFLASH_SS(N, FORMAT, A, B, ADD)                                                      \
  asm volatile("{.reg .pred p; setp.ne.b32 p," ADD ",0; wgmma.mma_async.sync.aligned.m64n" #N \
               "k16.f32." FORMAT "." FORMAT " {" CUFLASH_TEXT_##N "}," A "," B ",p,1,1,0,0;}" \
               : CUFLASH_OPERANDS_##N                                                         \
               : "l"(a), "l"(b), "r"(static_cast<u32>(add)))
#define CUFLASH_SS_AS(N, FORMAT, A, B, ADD, TRANS_A, TRANS_B)                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p," ADD ",0; wgmma.mma_async.sync.aligned.m64n" #N    \
               "k16.f32." FORMAT "." FORMAT " {" CUFLASH_TEXT_##N "}," A "," B ",p,1,1," TRANS_A \
                                                                  "," TRANS_B ";}"               \
               : CUFLASH_OPERANDS_##N                                                            \
               : "l"(a), "l"(b), "r"(static_cast<u32>(add)), "n"(kTransA ? 1 : 0),               \
                 "n"(kTransB ? 1 : 0))
#define CUFLASH_RS(N, FORMAT, A0, A1, A2, A3, B)                                                \
  asm volatile("{.reg .pred p; setp.ne.b32 p,1,0; wgmma.mma_async.sync.aligned.m64n" #N         \
               "k16.f32." FORMAT "." FORMAT " {" CUFLASH_TEXT_##N "},{" A0 "," A1 "," A2 "," A3 \
                                                                  "}," B ",p,1,1,1;}"           \
               : CUFLASH_OPERANDS_##N                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define CUFLASH_WGMMA(N, X0, X1, X2, X3, X4)                                                       \
  template <>                                                                                      \
  struct Wgmma<N> {                                                                                \
    template <bool kBf16, int kFirst, int kGroups>                                                 \
    __device__ __forceinline__ static void ss(float (&d)[2][kGroups][2], u64 a, u64 b, bool add) { \
      if constexpr (kBf16) {                                                                       \
        CUFLASH_SS(N, "bf16", X0, X1, X2);                                                         \
      } else {                                                                                     \
        CUFLASH_SS(N, "f16", X0, X1, X2);                                                          \
      }                                                                                            \
    }                                                                                              \
    template <bool kBf16, int kFirst, bool kTransA, bool kTransB, int kGroups>                     \
    __device__ __forceinline__ static void ss_as(float (&d)[2][kGroups][2], u64 a, u64 b,          \
                                                 bool add) {                                       \
      if constexpr (kBf16) {                                                                       \
        CUFLASH_SS_AS(N, "bf16", X0, X1, X2, X3, X4);                                              \
      } else {                                                                                     \
        CUFLASH_SS_AS(N, "f16", X0, X1, X2, X3, X4);                                               \
      }                                                                                            \
    }                                                                                              \
    template <bool kBf16, int kFirst, int kGroups>                                                 \
    __device__ __forceinline__ static void rs(float (&d)[2][kGroups][2], const u32 (&a)[4],        \
                                              u64 b) {                                             \
      if constexpr (kBf16) {                                                                       \
        CUFLASH_RS(N, "bf16", X0, X1, X2, X3, X4);                                                 \
      } else {                                                                                     \
        CUFLASH_RS(N, "f16", X0, X1, X2, X3, X4);                                                  \
      }                                                                                            \
    }                                                                                              \
  }
CUFLASH_WGMMA(8, "%4", "%5", "%6", "%7", "%8");
CUFLASH_WGMMA(16, "%8", "%9", "%10", "%11", "%12");
CUFLASH_WGMMA(32, "%16", "%17", "%18", "%19", "%20");
CUFLASH_WGMMA(64, "%32", "%33", "%34", "%35", "%36");
CUFLASH_WGMMA(72, "%36", "%37", "%38", "%39", "%40");
CUFLASH_WGMMA(80, "%40", "%41", "%42", "%43", "%44");
CUFLASH_WGMMA(96, "%48", "%49", "%50", "%51", "%52");
CUFLASH_WGMMA(112, "%56", "%57", "%58", "%59", "%60");
CUFLASH_WGMMA(128, "%64", "%65", "%66", "%67", "%68");
CUFLASH_WGMMA(136, "%68", "%69", "%70", "%71", "%72");
CUFLASH_WGMMA(144, "%72", "%73", "%74", "%75", "%76");
CUFLASH_WGMMA(160, "%80", "%81", "%82", "%83", "%84");
CUFLASH_WGMMA(176, "%88", "%89", "%90", "%91", "%92");
CUFLASH_WGMMA(192, "%96", "%97", "%98", "%99", "%100");
CUFLASH_WGMMA(256, "%128", "%129", "%130", "%131", "%132");

}  // namespace cuflash::ptx

// wgmma: products of a warpgroup (sm_90a), m64nNk16 of 16-bit numbers and m64nNk32 of e4m3, accumulated in
// float32.
//
// B lies in shared memory, A there too or in registers; descriptors (wgmma_desc.cuh) say where. A product
// runs by itself from its issue until its warpgroup has waited for its group. In between nobody touches its
// accumulators and fragments of A, nor overwrites what it reads; and what ordinary stores have put there,
// fence_proxy_async has made visible before. Four calls make a product:
//
//   wgmma_fence(acc, a);                       // the registers are as wgmma shall find them
//   wgmma<T>(acc.tile[0], …); …                // several, along k
//   wgmma_commit();                            // they are a group
//   wgmma_wait<0>(acc, a);                     // the registers are free again
//
// All 128 threads make the same calls. Element e of accumulator tile n of a lane sits at row 16·warp + lane/4
// + 8·(e/2), column 8·n + 2·(lane%4) + e%2: what mma.cuh has for a warp, so that what works on its
// accumulators (acc, softmax, mask, tile) works on these.
#pragma once
#include "prim/mma.cuh"
#include "prim/proxy.cuh"
#include "prim/wgmma_desc.cuh"
#include "prim/warpgroup.cuh"
#if defined(CUATTN_SIMT)
#include "simt/wgmma.h"
#endif

/// Four exponent bits, three of mantissa.
/// NOTE: their products are added with less than float32 has. Hopper's tensor cores align the 32 products of
/// an element and its accumulator at the largest exponent among them, 2^e, drop what lies below 2^(e − 13),
/// and keep 13 bits of the sum behind its leading one. So each wgmma may cost 2^−13 of the running sum: a
/// kernel with many along k takes the accumulator out every few and adds it up in float32. Reported by
/// DeepSeek-V3 (arXiv 2412.19437, 3.5.2) and SageAttention2 (arXiv 2411.10958); bits from an H200 agree. The
/// CPU machine adds in float32.
struct float8_e4m3 {
  uint8_t bits;
};

constexpr int WGMMA_ROWS = 64;
/// Steps along k of one product: 32 bytes.
template <class T> constexpr int wgmma_depth() { return 32 / int(sizeof(T)); }

/// A warpgroup's float32 accumulator of ROWS × COLS; a tile row is a product's 64 rows.
template <int ROWS_, int COLS_> struct WarpgroupAccumulator {
  static constexpr int ROWS = ROWS_, COLS = COLS_, M_TILES = ROWS_ / WGMMA_ROWS, N_TILES = COLS_ / MMA_N;
  static_assert(ROWS % WGMMA_ROWS == 0 && COLS % MMA_N == 0, "whole products");
  float tile[M_TILES][N_TILES][4];

  METHOD void clear() {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) tile[m][n][0] = tile[m][n][1] = tile[m][n][2] = tile[m][n][3] = 0.f;
  }
  /// Row (inside the warpgroup's rows) of this lane's `half` (0, 1) of tile row m; column of element e of
  /// tile column n.
  static METHOD int row(int m, int half) {
    return m * WGMMA_ROWS + warp_in_group() * MMA_M + half * 8 + lane_id() / 4;
  }
  static METHOD int col(int n, int e) { return n * MMA_N + 2 * (lane_id() % 4) + e % 2; }
};

/// The left operand of products over COLS numbers along k, in a warpgroup's registers.
template <int ROWS_, int COLS_> struct WarpgroupFragments {
  static constexpr int ROWS = ROWS_, COLS = COLS_, M_TILES = ROWS_ / WGMMA_ROWS, STEPS = COLS_ / MMA_K;
  uint32_t step[M_TILES][STEPS][4];

  /// An accumulator rounded to T: it has the layout of the left operand of the next product.
  template <class T> METHOD void round(const WarpgroupAccumulator<ROWS, COLS>& acc) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          step[m][k][i] =
              pack2<T>(acc.tile[m][2 * k + i / 2][i % 2 * 2], acc.tile[m][2 * k + i / 2][i % 2 * 2 + 1]);
  }
};

// ---- registers that a fence or a wait names

#if !defined(CUATTN_SIMT)
// NOTE: the compiler knows nothing of registers that change by themselves. As operands of an empty statement
// between volatile ones they are read, written and kept on the right side of it.
DEVICE void hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void hold(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
template <class T, int N> DEVICE void hold(T (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) hold(x[i]);
}
template <int ROWS, int COLS> DEVICE void hold(WarpgroupAccumulator<ROWS, COLS>& acc) { hold(acc.tile); }
template <int ROWS, int COLS> DEVICE void hold(WarpgroupFragments<ROWS, COLS>& r) { hold(r.step); }
#endif
struct NoRegisters {};
#if !defined(CUATTN_SIMT)
DEVICE void hold(NoRegisters&) {}
#endif

/// What products now started take from registers is what the named ones hold: accumulators that are added to,
/// fragments of A. Once after the last wait, and after each change. PTX wgmma.fence.
template <class A, class B, class C> DEVICE void wgmma_fence(A& a, B& b, C& c SITE) {
#if defined(CUATTN_SIMT)
  const simt::Registers named[] = {{&a, sizeof a}, {&b, sizeof b}, {&c, sizeof c}};
  simt::wgmma_fence(named, 3 AT_SITE);
#else
  hold(a), hold(b), hold(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
template <class A, class B> DEVICE void wgmma_fence(A& a, B& b SITE) {
  NoRegisters none;
  wgmma_fence(a, b, none AT_SITE);
}
template <class A> DEVICE void wgmma_fence(A& a SITE) {
  NoRegisters none;
  wgmma_fence(a, none, none AT_SITE);
}
DEVICE void wgmma_fence(SITE_ONLY) {
  NoRegisters none;
  wgmma_fence(none, none, none AT_SITE);
}

/// Closes the group of products since the last commit. PTX wgmma.commit_group.
DEVICE void wgmma_commit(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::wgmma_commit(ONLY_AT_SITE);
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// Waits until at most PENDING groups are under way; names the registers of those that are over. PTX
/// wgmma.wait_group.
template <int PENDING, class A, class B, class C> DEVICE void wgmma_wait(A& a, B& b, C& c SITE) {
#if defined(CUATTN_SIMT)
  simt::wgmma_wait(PENDING AT_SITE);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  hold(a), hold(b), hold(c);
#endif
}
template <int PENDING, class A, class B> DEVICE void wgmma_wait(A& a, B& b SITE) {
  NoRegisters none;
  wgmma_wait<PENDING>(a, b, none AT_SITE);
}
template <int PENDING, class A> DEVICE void wgmma_wait(A& a SITE) {
  NoRegisters none;
  wgmma_wait<PENDING>(a, none, none AT_SITE);
}
template <int PENDING> DEVICE void wgmma_wait(SITE_ONLY) {
  NoRegisters none;
  wgmma_wait<PENDING>(none, none, none AT_SITE);
}

// ---- the instruction, in its shapes

#if !defined(CUATTN_SIMT)
template <int N> struct WgmmaShape {
  static_assert(N < 0, "no wgmma of this width: add it to SHAPES in cuattn/wgmma_shapes.py");
};
#define WGMMA(shape, types, sums, a, b, add, rest, ...)                                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" shape \
               ".f32." types " {" sums "}, " a ", " b ", add, 1, 1" rest ";\n}" __VA_ARGS__)
#define WGMMA_SHAPE(N, sums, operands, p0, p1, p2, p3, p4, p5, p6)                                           \
  template <> struct WgmmaShape<N> {                                                                         \
    template <class T, int TRANS_A, int TRANS_B>                                                             \
    static METHOD void run(float (&d)[N / 8][4], uint64_t a, uint64_t b, int add) {                          \
      if constexpr (sizeof(T) == 1)                                                                          \
        WGMMA(#N "k32", "e4m3.e4m3", sums, p0, p1, p2, "", : operands : "l"(a), "l"(b), "r"(add));           \
      else if constexpr (IsBfloat16<T>::value)                                                               \
        WGMMA(#N "k16", "bf16.bf16", sums, p0, p1, p2, ", " p3 ", " p4, : operands : "l"(a), "l"(b),         \
              "r"(add), "n"(TRANS_A), "n"(TRANS_B));                                                         \
      else                                                                                                   \
        WGMMA(#N "k16", "f16.f16", sums, p0, p1, p2, ", " p3 ", " p4, : operands : "l"(a), "l"(b), "r"(add), \
              "n"(TRANS_A), "n"(TRANS_B));                                                                   \
    }                                                                                                        \
    template <class T, int TRANS_B>                                                                          \
    static METHOD void run(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int add) {              \
      if constexpr (sizeof(T) == 1)                                                                          \
        WGMMA(#N "k32", "e4m3.e4m3", sums, "{" p0 ", " p1 ", " p2 ", " p3 "}", p4, p5,                       \
              "", : operands : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                \
      else if constexpr (IsBfloat16<T>::value)                                                               \
        WGMMA(#N "k16", "bf16.bf16", sums, "{" p0 ", " p1 ", " p2 ", " p3 "}", p4, p5,                       \
              ", " p6, : operands : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add),            \
              "n"(TRANS_B));                                                                                 \
      else                                                                                                   \
        WGMMA(#N "k16", "f16.f16", sums, "{" p0 ", " p1 ", " p2 ", " p3 "}", p4, p5,                         \
              ", " p6, : operands : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add),            \
              "n"(TRANS_B));                                                                                 \
    }                                                                                                        \
  }
// <shapes>: written by `python -m cuattn.wgmma_shapes`
// clang-format off
#define D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define D2(i) D1(i), D1(i + 1)
#define D4(i) D2(i), D2(i + 2)
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define REGISTERS_8 "%0, %1, %2, %3"
#define REGISTERS_16 REGISTERS_8 ", %4, %5, %6, %7"
#define REGISTERS_24 REGISTERS_16 ", %8, %9, %10, %11"
#define REGISTERS_32 REGISTERS_24 ", %12, %13, %14, %15"
#define REGISTERS_40 REGISTERS_32 ", %16, %17, %18, %19"
#define REGISTERS_48 REGISTERS_40 ", %20, %21, %22, %23"
#define REGISTERS_64 REGISTERS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_80 REGISTERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_96 REGISTERS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_112 REGISTERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS_128 REGISTERS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_144 REGISTERS_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS_160 REGISTERS_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_176 REGISTERS_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define REGISTERS_192 REGISTERS_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_208 REGISTERS_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define REGISTERS_224 REGISTERS_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define REGISTERS_240 REGISTERS_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define REGISTERS_256 REGISTERS_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define OPERANDS_8 D1(0)
#define OPERANDS_16 D2(0)
#define OPERANDS_24 D2(0), D1(2)
#define OPERANDS_32 D4(0)
#define OPERANDS_40 D4(0), D1(4)
#define OPERANDS_48 D4(0), D2(4)
#define OPERANDS_64 D8(0)
#define OPERANDS_80 D8(0), D2(8)
#define OPERANDS_96 D8(0), D4(8)
#define OPERANDS_112 D8(0), D4(8), D2(12)
#define OPERANDS_128 D16(0)
#define OPERANDS_144 D16(0), D2(16)
#define OPERANDS_160 D16(0), D4(16)
#define OPERANDS_176 D16(0), D4(16), D2(20)
#define OPERANDS_192 D16(0), D8(16)
#define OPERANDS_208 D16(0), D8(16), D2(24)
#define OPERANDS_224 D16(0), D8(16), D4(24)
#define OPERANDS_240 D16(0), D8(16), D4(24), D2(28)
#define OPERANDS_256 D16(0), D16(16)
WGMMA_SHAPE(8, REGISTERS_8, OPERANDS_8, "%4", "%5", "%6", "%7", "%8", "%9", "%10");
WGMMA_SHAPE(16, REGISTERS_16, OPERANDS_16, "%8", "%9", "%10", "%11", "%12", "%13", "%14");
WGMMA_SHAPE(24, REGISTERS_24, OPERANDS_24, "%12", "%13", "%14", "%15", "%16", "%17", "%18");
WGMMA_SHAPE(32, REGISTERS_32, OPERANDS_32, "%16", "%17", "%18", "%19", "%20", "%21", "%22");
WGMMA_SHAPE(40, REGISTERS_40, OPERANDS_40, "%20", "%21", "%22", "%23", "%24", "%25", "%26");
WGMMA_SHAPE(48, REGISTERS_48, OPERANDS_48, "%24", "%25", "%26", "%27", "%28", "%29", "%30");
WGMMA_SHAPE(64, REGISTERS_64, OPERANDS_64, "%32", "%33", "%34", "%35", "%36", "%37", "%38");
WGMMA_SHAPE(80, REGISTERS_80, OPERANDS_80, "%40", "%41", "%42", "%43", "%44", "%45", "%46");
WGMMA_SHAPE(96, REGISTERS_96, OPERANDS_96, "%48", "%49", "%50", "%51", "%52", "%53", "%54");
WGMMA_SHAPE(112, REGISTERS_112, OPERANDS_112, "%56", "%57", "%58", "%59", "%60", "%61", "%62");
WGMMA_SHAPE(128, REGISTERS_128, OPERANDS_128, "%64", "%65", "%66", "%67", "%68", "%69", "%70");
WGMMA_SHAPE(144, REGISTERS_144, OPERANDS_144, "%72", "%73", "%74", "%75", "%76", "%77", "%78");
WGMMA_SHAPE(160, REGISTERS_160, OPERANDS_160, "%80", "%81", "%82", "%83", "%84", "%85", "%86");
WGMMA_SHAPE(176, REGISTERS_176, OPERANDS_176, "%88", "%89", "%90", "%91", "%92", "%93", "%94");
WGMMA_SHAPE(192, REGISTERS_192, OPERANDS_192, "%96", "%97", "%98", "%99", "%100", "%101", "%102");
WGMMA_SHAPE(208, REGISTERS_208, OPERANDS_208, "%104", "%105", "%106", "%107", "%108", "%109", "%110");
WGMMA_SHAPE(224, REGISTERS_224, OPERANDS_224, "%112", "%113", "%114", "%115", "%116", "%117", "%118");
WGMMA_SHAPE(240, REGISTERS_240, OPERANDS_240, "%120", "%121", "%122", "%123", "%124", "%125", "%126");
WGMMA_SHAPE(256, REGISTERS_256, OPERANDS_256, "%128", "%129", "%130", "%131", "%132", "%133", "%134");
#undef D1
#undef D2
#undef D4
#undef D8
#undef D16
#undef REGISTERS_8
#undef OPERANDS_8
#undef REGISTERS_16
#undef OPERANDS_16
#undef REGISTERS_24
#undef OPERANDS_24
#undef REGISTERS_32
#undef OPERANDS_32
#undef REGISTERS_40
#undef OPERANDS_40
#undef REGISTERS_48
#undef OPERANDS_48
#undef REGISTERS_64
#undef OPERANDS_64
#undef REGISTERS_80
#undef OPERANDS_80
#undef REGISTERS_96
#undef OPERANDS_96
#undef REGISTERS_112
#undef OPERANDS_112
#undef REGISTERS_128
#undef OPERANDS_128
#undef REGISTERS_144
#undef OPERANDS_144
#undef REGISTERS_160
#undef OPERANDS_160
#undef REGISTERS_176
#undef OPERANDS_176
#undef REGISTERS_192
#undef OPERANDS_192
#undef REGISTERS_208
#undef OPERANDS_208
#undef REGISTERS_224
#undef OPERANDS_224
#undef REGISTERS_240
#undef OPERANDS_240
#undef REGISTERS_256
#undef OPERANDS_256
// clang-format on
// </shapes>
#undef WGMMA_SHAPE
#undef WGMMA
#endif

#if defined(CUATTN_SIMT)
template <class T> constexpr simt::Element wgmma_element() {
  return sizeof(T) == 1         ? simt::Element::e4m3
         : IsBfloat16<T>::value ? simt::Element::bf16
                                : simt::Element::f16;
}
#endif

/// d (64 × 8·TILES) = a b, or += with `accumulate`; a and b are descriptors. PTX wgmma.mma_async.
template <class T, Major A = Major::K, Major B = Major::K, int TILES>
DEVICE void wgmma(float (&d)[TILES][4], uint64_t a, uint64_t b, bool accumulate SITE) {
  static_assert(sizeof(T) == 2 || (A == Major::K && B == Major::K), "8-bit operands are K-major");
#if defined(CUATTN_SIMT)
  simt::wgmma({a, b, 8 * TILES, int(wgmma_element<T>()), false, A == Major::MN, B == Major::MN, accumulate},
              d[0], nullptr AT_SITE);
#else
  WgmmaShape<8 * TILES>::template run<T, int(A), int(B)>(d, a, b, accumulate);
#endif
}

/// The same with a warp's 16 rows of a in its registers: a fragment of mma.cuh. It stays as it is until the
/// wait.
template <class T, Major B = Major::K, int TILES>
DEVICE void wgmma(float (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulate SITE) {
  static_assert(sizeof(T) == 2 || B == Major::K, "8-bit operands are K-major");
#if defined(CUATTN_SIMT)
  simt::wgmma({0, b, 8 * TILES, int(wgmma_element<T>()), true, false, B == Major::MN, accumulate}, d[0],
              a AT_SITE);
#else
  WgmmaShape<8 * TILES>::template run<T, int(B)>(d, a, b, accumulate);
#endif
}

// ---- products of whole tiles: issued, not fenced, committed or waited for

/// acc = A Bᵀ, or += with `accumulate`: A the rows of s_a from `row` on, B every row of s_b.
template <class T, class Acc, class TileA, class TileB>
DEVICE void wgmma_abt(Acc& acc, const TileA& s_a, int row, const TileB& s_b, bool accumulate SITE) {
  static_assert(TileA::COLS == TileB::COLS && TileB::ROWS == Acc::COLS, "shapes must agree");
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int k = 0; k < TileA::COLS; k += wgmma_depth<T>())
      wgmma<T>(acc.tile[m], s_a.k_major(row + m * WGMMA_ROWS, k AT_SITE), s_b.k_major(0, k AT_SITE),
               accumulate || k AT_SITE);
}

/// acc = A B, or += with `accumulate`: A in registers, B row-major in s_b, as V is for P V.
template <class T, class Acc, class Fragments, class TileB>
DEVICE void wgmma_ab(Acc& acc, const Fragments& r_a, const TileB& s_b, bool accumulate SITE) {
  static_assert(Fragments::STEPS * MMA_K == TileB::ROWS && TileB::COLS == Acc::COLS, "shapes must agree");
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int k = 0; k < Fragments::STEPS; ++k)
      wgmma<T, Major::MN>(acc.tile[m], r_a.step[m][k], s_b.mn_major(k * MMA_K, 0 AT_SITE),
                          accumulate || k AT_SITE);
}

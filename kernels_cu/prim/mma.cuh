// mma: tensor-core tiles of 16 × 8 × 16 (sm_80), and the fragments they work on.
//
// Accumulator element e of a lane sits at row lane/4 + 8·(e/2), column 2·(lane%4) + e%2 of its 16 × 8 tile.
#pragma once
#include "prim/smem.cuh"
#include "prim/warp.cuh"

constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;

/// Four 8 × 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. PTX
/// ldmatrix.x4.
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* s_row SITE) {
#if defined(CUATTN_SIMT)
  simt::ldmatrix(r, 4, false, s_row AT_SITE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(s_row))
               : "memory");
#endif
}

/// The same, each matrix transposed. PTX ldmatrix.x4.trans.
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* s_row SITE) {
#if defined(CUATTN_SIMT)
  simt::ldmatrix(r, 4, true, s_row AT_SITE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(s_row))
               : "memory");
#endif
}

/// d += a b, accumulated in float32. PTX mma.sync.aligned.m16n8k16.
template <class T> DEVICE void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] SITE) {
#if defined(CUATTN_SIMT)
  simt::mma_m16n8k16(d, a, b, IsBfloat16<T>::value AT_SITE);
#else
  if constexpr (IsBfloat16<T>::value)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/// A warp's float32 accumulator of ROWS × COLS, in mma tiles.
template <int ROWS_, int COLS_> struct Accumulator {
  static constexpr int ROWS = ROWS_, COLS = COLS_, M_TILES = ROWS_ / MMA_M, N_TILES = COLS_ / MMA_N;
  static_assert(ROWS % MMA_M == 0 && COLS % (2 * MMA_N) == 0, "whole mma tiles, in pairs along the columns");
  float tile[M_TILES][N_TILES][4];

  METHOD void clear() {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) tile[m][n][0] = tile[m][n][1] = tile[m][n][2] = tile[m][n][3] = 0.f;
  }
  /// Row (inside the warp's rows) of this lane's `half` (0, 1) of tile row m; column of element e of tile
  /// column n.
  static METHOD int row(int m, int half) { return m * MMA_M + half * 8 + lane_id() / 4; }
  static METHOD int col(int n, int e) { return n * MMA_N + 2 * (lane_id() % 4) + e % 2; }
};

/// A 16 × 16 fragment of the left operand, from rows `row`… and columns `col`… of a row-major tile.
template <class Tile> DEVICE void load_a(uint32_t (&a)[4], const Tile& s, int row, int col SITE) {
  ldmatrix_x4(a, s.at(row + lane_id() % 16, col + lane_id() / 16 * 8) AT_SITE);
}

/// Two right operands of 16 × 8 from a tile stored [column][k] (as K is for Q Kᵀ): b[0] for columns n…n+7,
/// b[1] for n+8….
template <class Tile> DEVICE void load_b_rows(uint32_t (&b)[2][2], const Tile& s, int n, int k SITE) {
  uint32_t r[4];
  ldmatrix_x4(r, s.at(n + lane_id() % 8 + lane_id() / 16 * 8, k + lane_id() / 8 % 2 * 8) AT_SITE);
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

/// The same from a tile stored [k][column] (as V is for P V).
template <class Tile> DEVICE void load_b_cols(uint32_t (&b)[2][2], const Tile& s, int k, int n SITE) {
  uint32_t r[4];
  ldmatrix_x4_trans(r, s.at(k + lane_id() % 16, n + lane_id() / 16 * 8) AT_SITE);
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

/// One step along the inner dimension: acc += a b, with `load_b(b, n)` fetching the two tile columns from n
/// on.
template <class T, class Acc, class LoadB>
DEVICE void multiply_step(Acc& acc, const uint32_t (&a)[Acc::M_TILES][4], LoadB load_b SITE) {
#pragma unroll
  for (int n = 0; n < Acc::N_TILES; n += 2) {
    uint32_t b[2][2];
    load_b(b, n * MMA_N);
#pragma unroll
    for (int m = 0; m < Acc::M_TILES; ++m) {
      mma_16816<T>(acc.tile[m][n], a[m], b[0] AT_SITE);
      mma_16816<T>(acc.tile[m][n + 1], a[m], b[1] AT_SITE);
    }
  }
}

/// acc += A Bᵀ, A the warp's rows from `row` of s_a, B every row of s_b; both row-major over the same inner
/// dimension. NOTE: unrolled by two only. Unrolled whole, ptxas fetches so many fragments ahead that wide
/// accumulators spill.
template <class T, class Acc, class TileA, class TileB>
DEVICE void multiply_abt(Acc& acc, const TileA& s_a, int row, const TileB& s_b SITE) {
  static_assert(TileA::COLS == TileB::COLS && TileB::ROWS == Acc::COLS, "shapes must agree");
#pragma unroll 2
  for (int k = 0; k < TileB::COLS; k += MMA_K) {
    uint32_t a[Acc::M_TILES][4];
#pragma unroll
    for (int m = 0; m < Acc::M_TILES; ++m) load_a(a[m], s_a, row + m * MMA_M, k AT_SITE);
    multiply_step<T>(acc, a, [&](uint32_t (&b)[2][2], int n) { load_b_rows(b, s_b, n, k AT_SITE); } AT_SITE);
  }
}

/// acc += A B, A the warp's rows from `row` of s_a, B row-major in s_b.
template <class T, class Acc, class TileA, class TileB>
DEVICE void multiply_ab(Acc& acc, const TileA& s_a, int row, const TileB& s_b SITE) {
  static_assert(TileA::COLS == TileB::ROWS && TileB::COLS == Acc::COLS, "shapes must agree");
#pragma unroll
  for (int k = 0; k < TileB::ROWS; k += MMA_K) {
    uint32_t a[Acc::M_TILES][4];
#pragma unroll
    for (int m = 0; m < Acc::M_TILES; ++m) load_a(a[m], s_a, row + m * MMA_M, k AT_SITE);
    multiply_step<T>(acc, a, [&](uint32_t (&b)[2][2], int n) { load_b_cols(b, s_b, k, n AT_SITE); } AT_SITE);
  }
}

/// acc += A B, with A a float32 accumulator rounded to T where it lies: P V without P leaving the registers,
/// because the accumulator of one product has the layout of the left operand of the next.
template <class T, class Acc, class AccA, class TileB>
DEVICE void multiply_ab(Acc& acc, const AccA& r_a, const TileB& s_b SITE) {
  static_assert(AccA::COLS == TileB::ROWS && TileB::COLS == Acc::COLS && AccA::ROWS == Acc::ROWS,
                "shapes must agree");
#pragma unroll
  for (int k = 0; k < AccA::N_TILES; k += 2) {
    uint32_t a[Acc::M_TILES][4];
#pragma unroll
    for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][i] = pack2<T>(r_a.tile[m][k + i / 2][i % 2 * 2], r_a.tile[m][k + i / 2][i % 2 * 2 + 1]);
    multiply_step<T>(acc, a,
                     [&](uint32_t (&b)[2][2], int n) { load_b_cols(b, s_b, k * MMA_N, n AT_SITE); } AT_SITE);
  }
}

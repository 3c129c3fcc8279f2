// wide_rows: rows of an accumulator to global memory, 16 bytes a store.
//
// A lane of an accumulator has two neighbouring numbers of a row, four bytes. The four lanes of a quad hold the
// same row: over four tile columns they exchange words until each has one of these whole, 8 numbers in a row.
#pragma once
#include "prim/gmem.cuh"
#include "prim/mma.cuh"

/// Lane j of a quad comes with word j of each of four groups and leaves with the words of group j.
DEVICE void quad_transpose(uint32_t (&r)[4] SITE) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = lane_id() & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t got = shuffle_xor(upper ? r[i] : r[i + distance], distance AT_SITE);
      (upper ? r[i] : r[i + distance]) = got;
    }
  }
}

/// Writes the accumulator, rounded to T of 16 bits, to rows `stride` elements apart, all of whose parts of 8 are
/// aligned to 16 bytes: those below `rows`, and of each the columns below `cols`, a multiple of 8.
template <class T, class Acc>
DEVICE void store_wide_rows(T* g, int64_t stride, const Acc& acc, int rows, int cols SITE) {
  static_assert(Acc::N_TILES % 4 == 0, "a quad exchanges four tile columns");
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < Acc::N_TILES; n += 4) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          r[i] = pack2<T>(acc.tile[m][n + i][2 * half], acc.tile[m][n + i][2 * half + 1]);
        quad_transpose(r AT_SITE);
        const int row = Acc::row(m, half), col = (n + lane_id() % 4) * MMA_N;
        if (row < rows && col < cols)
          store_global(reinterpret_cast<Vec16*>(g + row * stride + col), Vec16{{r[0], r[1], r[2], r[3]}} AT_SITE);
      }
}

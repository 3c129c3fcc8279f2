// acc: a warp's accumulator as plain numbers: walked in pairs, scaled, rounded, and moved to and from rows of
// global memory.
#pragma once
#include "prim/gmem.cuh"
#include "prim/mma.cuh"

/// Calls f(row, column, a, b) for each two neighbours of a row that this lane holds: a at `column`, b behind.
template <class Acc, class F> DEVICE void for_pairs(Acc& acc, F f) {
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < Acc::N_TILES; ++n)
        f(Acc::row(m, half), Acc::col(n, 0), acc.tile[m][n][2 * half], acc.tile[m][n][2 * half + 1]);
}

/// acc *= factor.
template <class Acc> DEVICE void scale(Acc& acc, float factor) {
  for_pairs(acc, [&](int, int, float& a, float& b) { a *= factor, b *= factor; });
}

/// Rounds every number to T.
template <class T, class Acc> DEVICE void round_to(Acc& acc) {
  if constexpr (sizeof(T) == 2)
    for_pairs(acc, [](int, int, float& a, float& b) {
      const uint32_t both = pack2<T>(a, b);
      a = to_float(T{uint16_t(both)}), b = to_float(T{uint16_t(both >> 16)});
    });
}

/// Writes the accumulator, rounded to T, to rows `stride` elements apart: those below `rows`, and of each the
/// columns below `cols` (even).
template <class T, class Acc>
DEVICE void store_rows(T* g, int64_t stride, const Acc& acc, int rows, int cols SITE) {
  for_pairs(acc, [&](int row, int col, float a, float b) {
    if (row < rows && col < cols) store_pair(g + row * stride + col, a, b AT_SITE);
  });
}

/// Reads what `store_rows` wrote; rows and columns beyond become 0.
template <class T, class Acc>
DEVICE void load_rows(Acc& acc, const T* g, int64_t stride, int rows, int cols SITE) {
  for_pairs(acc, [&](int row, int col, float& a, float& b) {
    const bool there = row < rows && col < cols;
    const Pair both = there ? load_pair(g + row * stride + col AT_SITE) : Pair{0.f, 0.f};
    a = both.a, b = both.b;
  });
}

// acc: a warp's accumulator as plain numbers: scaled, and written to global memory from where it lies.
#pragma once
#include "prim/gmem.cuh"
#include "prim/mma.cuh"

/// acc *= factor.
template <class Acc> DEVICE void scale(Acc& acc, float factor) {
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc.tile[m][n][e] *= factor;
}

/// Writes the accumulator, rounded to T, to rows `stride` elements apart: those below `rows`, and of each the
/// columns below `cols` (even).
template <class T, class Acc>
DEVICE void store_rows(T* g, int64_t stride, const Acc& acc, int rows, int cols SITE) {
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < Acc::N_TILES; ++n)
        if (Acc::row(m, half) < rows && Acc::col(n, 0) < cols)
          store_pair(g + Acc::row(m, half) * stride + Acc::col(n, 0), acc.tile[m][n][2 * half],
                     acc.tile[m][n][2 * half + 1] AT_SITE);
}

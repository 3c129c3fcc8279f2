// mask: which key a query may see. Masked scores become -inf.
#pragma once
#include "prim/mma.cuh"

/// Number of leading keys that query row `m` of M sees among N: all of them, or up to the bottom-right
/// diagonal.
DEVICE int visible_keys(bool causal, int m, int M, int N) {
  int limit = causal ? m + 1 + N - M : N;
  return limit < N ? limit : N;
}

/// Hides the keys a row does not see. `row0`, `key0`: the query and key of the accumulator's first row and
/// column.
template <class Acc> DEVICE void mask_scores(Acc& r_s, bool causal, int row0, int key0, int M, int N) {
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int limit = visible_keys(causal, row0 + Acc::row(m, half), M, N) - key0;
#pragma unroll
      for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
          if (Acc::col(n, e) >= limit) r_s.tile[m][n][e] = -INFINITY;
    }
}

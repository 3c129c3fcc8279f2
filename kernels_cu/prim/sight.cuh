// sight: the keys that each query of a sequence sees, where a sliding window may narrow the causal mask.
#pragma once
#include "prim/mask.cuh"

/// Tiles of keys that some rows see, `first` to `end` − 1; every row sees those from `whole` to `part` − 1
/// whole.
struct Tiles {
  int first, whole, part, end;
};

/// Query m of M sees key m + N − M, of N, with up to `left` keys before it and `right` behind; CAUSAL masks
/// what lies behind where there is no window, and `left` and `right` are not read.
template <bool CAUSAL, bool WINDOW> struct Sight {
  int M, N, left, right;

  /// The first key that query m sees, and one past its last; no key where that is not above 0.
  METHOD int begin(int m) const { return WINDOW ? max(visible_keys(true, m - left - 1, M, N), 0) : 0; }
  METHOD int end(int m) const { return visible_keys(CAUSAL || WINDOW, WINDOW ? m + right : m, M, N); }

  /// What the queries m0 to m1 see in tiles of BLOCK_N keys.
  template <int BLOCK_N> METHOD Tiles tiles(int m0, int m1) const {
    return {begin(m0) / BLOCK_N, ceil_div(begin(m1), BLOCK_N), max(end(m0), 0) / BLOCK_N,
            ceil_div(max(end(m1), 0), BLOCK_N)};
  }

  /// Hides the keys that a row does not see. `row0`, `key0`: the query and key of the accumulator's first row
  /// and column.
  template <class Acc> METHOD void mask(Acc& r_s, int row0, int key0) const {
    mask_scores(r_s, CAUSAL || WINDOW, WINDOW ? row0 + right : row0, key0, M, N);
    if constexpr (WINDOW) {
#pragma unroll
      for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int first = begin(row0 + Acc::row(m, half)) - key0;
#pragma unroll
          for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e)
              if (Acc::col(n, e) < first) r_s.tile[m][n][e] = -INFINITY;
        }
    }
  }
};

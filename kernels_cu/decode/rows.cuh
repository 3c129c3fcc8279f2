// rows: the queries and query heads that share a KV head, as rows of tensor-core tiles.
//
//   row = m · GROUP + head of the group        of M · GROUP rows, in tiles of 16
//
// Query m is token N − M + m of a sequence of N; with CAUSAL it sees the keys up to its own.
#pragma once
#include "prim/sight.cuh"
#include "prim/tile.cuh"

constexpr int ROW_TILES = ceil_div(M * GROUP, MMA_M);

/// One tile of them.
struct Rows {
  int hkv, first, h0, count;  // KV head; first row; the head from which `head` counts; number of rows

  METHOD Rows(int hkv, int tile)
      : hkv(hkv), first(tile * MMA_M), h0(hkv * GROUP + (M == 1 ? first : 0)),
        count(min(M * GROUP - first, MMA_M)) {}

  METHOD int query(int row) const { return M == 1 ? 0 : (first + row) / GROUP; }
  METHOD int head(int row) const { return h0 + (M == 1 ? row : (first + row) % GROUP); }

  /// Where a row of O begins, and its LSE lies; of a split its part, behind those of the splits before.
  template <class T> METHOD T* o_at(const View<T, 4>& g_o, int b, int row, int part = 0) const {
    return g_o.at(b, part * M + query(row), head(row));
  }
  METHOD float* lse_at(const View<float, 3>& g_lse, int b, int row, int part = 0) const {
    return g_lse.at(b, head(row)) + part * M + query(row);
  }

  /// Starts copying Q of sequence b into a tile, by THREADS threads.
  template <int THREADS, class Tile>
  METHOD void load_q(Tile& s, const View<const Element, 4>& g_q, int b, int thread SITE) const {
    if constexpr (M == 1) {
      load_tile_async<THREADS>(s, g_q.at(b, 0, head(0)), g_q.stride[2], count, HEAD_DIM, thread AT_SITE);
    } else {
      using W = Walk<THREADS, Tile::COLS>;
      const W walk(thread);
      if (walk.rests()) return;
#pragma unroll 1
      for (int row = walk.row; row < Tile::ROWS; row += W::ROW_STEP)
        cp_async16(s.at(row, walk.col), g_q.at(b, query(row), head(row)) + walk.col,
                   row < count && walk.col < HEAD_DIM AT_SITE);
    }
  }

  /// Hides what rows do not see of the keys from `key0` on: those behind a query's own, of a sequence of N, and
  /// all from `end` on, which this warp does not have.
  template <class Acc> METHOD void mask(Acc& r_s, int key0, int N, int end) const {
    const int behind = key0 + Acc::COLS;
    if constexpr (!CAUSAL) {
      if (behind > end) mask_scores(r_s, false, 0, key0, 0, end);
    } else {
      const Sight<true, false> sight{M, N, 0, 0};
      if (behind <= min(sight.end(0), end)) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int last = min(sight.end(query(Acc::row(0, half))), end) - key0;
#pragma unroll
        for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e)
            if (Acc::col(n, e) >= last) r_s.tile[0][n][e] = -INFINITY;
      }
    }
  }
};

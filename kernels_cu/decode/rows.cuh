// rows: the queries and query heads that share a KV head, as rows of tensor-core tiles.
//
//   row = m · GROUP + head of the group        of M · GROUP rows, in tiles of 16
//
// Query m is token N − M + m of a sequence of N. Where they are compiled in, CAUSAL and WINDOW hide keys from
// it, and of SINKS each row has its head's.
#pragma once
#include "prim/gmem.cuh"
#include "prim/sight.cuh"
#include "prim/softmax.cuh"
#include "prim/tile.cuh"

constexpr int ROW_TILES = ceil_div(M * GROUP, MMA_M);

using QuerySight = Sight<CAUSAL, WINDOW>;

/// The first key of a sequence of N that some query sees. The last one sees the sequence's last key.
DEVICE int first_seen(int N, int left) { return QuerySight{M, N, left, 0}.begin(0); }

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

  /// Hides what rows do not see of the keys from `key0` on, and all from `end` on, which are not this block's.
  template <class Acc> METHOD void mask(Acc& r_s, int key0, int end, const QuerySight& sight) const {
    constexpr bool ALIKE = M == 1 || !(CAUSAL || WINDOW);  // whether all queries see the same keys
    const int behind = key0 + Acc::COLS;
    if constexpr (ALIKE) {
      if (behind > end) mask_scores(r_s, false, 0, key0, 0, end);
    } else {
      if (key0 >= sight.begin(M - 1) && behind <= min(sight.end(0), end)) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = query(Acc::row(0, half)), first = sight.begin(m) - key0,
                  last = min(sight.end(m), end) - key0;
#pragma unroll
        for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e)
            if ((WINDOW && Acc::col(n, e) < first) || Acc::col(n, e) >= last) r_s.tile[0][n][e] = -INFINITY;
      }
    }
  }

  /// Lets every row begin with its head's sink, as `begin_with_sink` of prim/sink.cuh. NOTE: of a sequence one
  /// warp does so, of the block that has its first keys.
  METHOD void begin_with_sinks(Softmax<MMA_M>& softmax, const float* g_sinks, float sigma SITE) const {
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Accumulator<MMA_M, MMA_M>::row(0, half);
      const float sink = lane % 4 == 0 && row < count ? load_global(g_sinks + head(row) AT_SITE) : -INFINITY;
      softmax.row[0][half] =
          SoftmaxRow(shuffle(sink, lane / 4 * 4 AT_SITE) / sigma, lane % 4 == 0 ? 1.f : 0.f);
    }
  }
};

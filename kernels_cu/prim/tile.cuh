// tile: movement of row-major tiles between global and shared memory, 16 bytes a thread and step.
#pragma once
#include "prim/cp_async.cuh"
#include "prim/gmem.cuh"
#include "prim/warp.cuh"

/// How THREADS threads walk a tile of COLS columns: each keeps its 16-byte column and steps down the rows, so
/// that a step is one addition. Where a row's chunks do not divide THREADS, the threads left over rest.
template <int THREADS, int COLS> struct Walk {
  static constexpr int CHUNKS = COLS / 8, ROW_STEP = THREADS / CHUNKS;
  static_assert(ROW_STEP > 0, "a step must cover a whole row");
  int row, col;

  METHOD explicit Walk(int thread) : row(thread / CHUNKS), col(thread % CHUNKS * 8) {}
  METHOD bool rests() const { return THREADS % CHUNKS != 0 && row >= ROW_STEP; }
};

/// Starts copying rows of `cols` elements (a multiple of 8), `stride` elements apart, into a tile. Rows from
/// `rows` on and columns from `cols` on become zero and are not read: whatever lies behind a tensor's end,
/// NaN included, never enters.
template <int THREADS, class T, class Tile>
DEVICE void load_tile_async(Tile& s, const T* g, int64_t stride, int rows, int cols, int thread SITE) {
  using W = Walk<THREADS, Tile::COLS>;
  const W walk(thread);
  if (walk.rests()) return;
  const T* from = g + walk.row * stride + walk.col;
  const int64_t step = W::ROW_STEP * stride;
#pragma unroll
  for (int i = 0; i < ceil_div(Tile::ROWS, W::ROW_STEP); ++i, from += step) {
    int row = walk.row + i * W::ROW_STEP;
    if (Tile::ROWS % W::ROW_STEP != 0 && row >= Tile::ROWS) break;
    cp_async16(s.at(row, walk.col), from, row < rows && walk.col < cols AT_SITE);
  }
}

/// Writes a warp's accumulator, rounded to T, into rows `row`… of a tile.
template <class T, class Acc, class Tile>
DEVICE void store_accumulator(Tile& s, int row, const Acc& acc SITE) {
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared(reinterpret_cast<uint32_t*>(s.at(row + Acc::row(m, half), Acc::col(n, 0))),
                     pack2<T>(acc.tile[m][n][2 * half], acc.tile[m][n][2 * half + 1]) AT_SITE);
}

/// Copies `rows` × `cols` elements from the ROWS rows at `row0` of a tile to global memory, by THREADS
/// threads.
template <int THREADS, int ROWS, class T, class Tile>
DEVICE void store_tile(T* g, int64_t stride, const Tile& s, int row0, int rows, int cols, int thread SITE) {
  using W = Walk<THREADS, Tile::COLS>;
  const W walk(thread);
  if (walk.rests() || walk.col >= cols) return;
#pragma unroll
  for (int i = 0; i < ceil_div(ROWS, W::ROW_STEP); ++i) {
    int row = walk.row + i * W::ROW_STEP;
    if (row >= rows || row >= ROWS) break;
    store_global(reinterpret_cast<Vec16*>(g + row * stride + walk.col),
                 load_shared(reinterpret_cast<const Vec16*>(s.at(row0 + row, walk.col)) AT_SITE) AT_SITE);
  }
}

// paged_tile: movement of a tile of rows from a paged cache to shared memory.
#pragma once
#include "prim/paging.cuh"
#include "prim/tile.cuh"

/// `load_tile_async` of the rows from `row0` on of a sequence that has `rows` from there, whose pages are listed
/// at `g_pages`. Each thread looks up the pages of the rows that it copies, and of no others.
template <int THREADS, int PAGE, class T, class Tile>
DEVICE void load_paged_tile_async(Tile& s, const View<T, 4>& cache, const int* g_pages, int hkv, int row0,
                                  int rows, int cols, int thread SITE) {
  using W = Walk<THREADS, Tile::COLS>;
  const W walk(thread);
  if (walk.rests()) return;
#pragma unroll
  for (int i = 0; i < ceil_div(Tile::ROWS, W::ROW_STEP); ++i) {
    const int row = walk.row + i * W::ROW_STEP;
    if (Tile::ROWS % W::ROW_STEP != 0 && row >= Tile::ROWS) break;
    const bool there = row < rows && walk.col < cols;
    const int page = there ? page_of<PAGE>(g_pages, row0 + row AT_SITE) : 0;
    cp_async16(s.at(row, walk.col), row_in_page<PAGE>(cache, page, row0 + row, hkv) + walk.col, there AT_SITE);
  }
}

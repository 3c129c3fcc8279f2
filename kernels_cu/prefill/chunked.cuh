// chunked: what the chunked kernels share: a chunk's scores, by rows or by columns, and its step of the
// softmax.
//
// CHUNK     queries or keys of a chunk
// BY_ROWS   a row's scores are neighbours; else a column's are, and what a warp reads of a row lies far apart
#pragma once
#include "prim/acc.cuh"
#include "prim/softmax.cuh"
#include "prim/tile.cuh"

constexpr int D_PAD = round_up(HEAD_DIM, MMA_K), PAIRS = ceil_div(CHUNK, 2 * WARP);
constexpr float ONE = LOG2_E;  // the scores are scaled already

/// A number that belongs to a warp's row, read once for all lanes.
DEVICE float load_for_warp(const float* g SITE) {
  return shuffle(lane_id() == 0 ? load_global(g AT_SITE) : 0.f, 0 AT_SITE);
}

/// Scores (row, col) and (row, col + 1) of a chunk in global memory.
DEVICE Pair load_scores(const View<Element, 3>& g_s, int head, int row, int col SITE) {
  if constexpr (BY_ROWS)
    return load_pair(g_s.at(head, row) + col AT_SITE);
  else
    return Pair{to_float(load_global(g_s.at(head, col) + row AT_SITE)),
                to_float(load_global(g_s.at(head, col + 1) + row AT_SITE))};
}
DEVICE void store_scores(const View<Element, 3>& g_s, int head, int row, int col, float a, float b SITE) {
  if constexpr (BY_ROWS) {
    store_pair(g_s.at(head, row) + col, a, b AT_SITE);
  } else {
    store_global(g_s.at(head, col) + row, from_float<Element>(a) AT_SITE);
    store_global(g_s.at(head, col + 1) + row, from_float<Element>(b) AT_SITE);
  }
}

/// Scores or weights in shared memory.
template <int ROWS_, int COLS_> struct ScoreTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_;
  SmemTile<Element, BY_ROWS ? ROWS : COLS, BY_ROWS ? COLS : ROWS> s;

  METHOD Pair load(int row, int col SITE) const {
    if constexpr (BY_ROWS) {
      const uint32_t both = load_shared(reinterpret_cast<const uint32_t*>(s.at(row, col)) AT_SITE);
      return Pair{to_float(Element{uint16_t(both)}), to_float(Element{uint16_t(both >> 16)})};
    } else {
      return Pair{to_float(load_shared(s.at(col, row) AT_SITE)),
                  to_float(load_shared(s.at(col + 1, row) AT_SITE))};
    }
  }
  METHOD void store(int row, int col, float a, float b SITE) {
    if constexpr (BY_ROWS) {
      store_shared(reinterpret_cast<uint32_t*>(s.at(row, col)), pack2<Element>(a, b) AT_SITE);
    } else {
      store_shared(s.at(col, row), from_float<Element>(a) AT_SITE);
      store_shared(s.at(col + 1, row), from_float<Element>(b) AT_SITE);
    }
  }
};

/// A 16 × 16 fragment of the left operand, as `load_a` of prim/mma.cuh takes it from a tile by rows.
template <int ROWS, int COLS>
DEVICE void load_a(uint32_t (&a)[4], const ScoreTile<ROWS, COLS>& tile, int row, int col SITE) {
  if constexpr (BY_ROWS)
    load_a(a, tile.s, row, col AT_SITE);
  else
    ldmatrix_x4_trans(a, tile.s.at(col + lane_id() % 8 + lane_id() / 16 * 8, row + lane_id() / 8 % 2 * 8)
                      AT_SITE);
}

/// Starts copying scores from (row, col) on: `rows` and `cols` of them; the rest of the tile becomes 0.
template <int THREADS, int ROWS, int COLS>
DEVICE void load_scores_async(ScoreTile<ROWS, COLS>& tile, const View<Element, 3>& g_s, int head, int row,
                              int col, int rows, int cols SITE) {
  if constexpr (BY_ROWS)
    load_tile_async<THREADS>(tile.s, g_s.at(head, row) + col, g_s.stride[1], rows, cols, threadIdx.x AT_SITE);
  else
    load_tile_async<THREADS>(tile.s, g_s.at(head, col) + row, g_s.stride[1], cols, round_up(rows, 8),
                             threadIdx.x AT_SITE);
}

/// Takes a chunk's scores into a row's state: every lane has some of them, in pairs. Returns the factor for
/// what was summed before; the scores' weights follow from the new state. The same bits in all lanes.
DEVICE float take_chunk(SoftmaxRow& state, const Pair (&r_s)[PAIRS] SITE) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) top = fmaxf(top, fmaxf(r_s[i].a, r_s[i].b));
  SoftmaxRow chunk;
  chunk.raise(top, ONE);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) chunk.l += chunk.weight(r_s[i].a, ONE) + chunk.weight(r_s[i].b, ONE);
  return state.merge(merge_lanes(chunk, ONE AT_SITE), ONE).mine;
}

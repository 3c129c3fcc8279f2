// slice: some rows of a chunk's scores in shared memory, so few that they fit, and how they come there.
//
// TILE_M    rows of a slice, 16 a warp; a warp's rows are its own
// TILE_N    keys of a tile: the chunk's scores lie as CHUNK / TILE_N tiles; as many keys or values come at
//           once
#pragma once
#include "prefill/chunked.cuh"
#include "prim/mask.cuh"

constexpr int THREADS = TILE_M / MMA_M * WARP, TILES = CHUNK / TILE_N;
static_assert(CHUNK % TILE_N == 0, "a tile must not reach into the next chunk");

using QTile = SmemTile<Element, TILE_M, D_PAD>;
using KVTile = SmemTile<Element, TILE_N, D_PAD>;
using Scores = ScoreTile<TILE_M, TILE_N>;
using Output = Accumulator<MMA_M, D_PAD>;

/// The keys or the values of one head.
struct Rows {
  const Element* g;
  int64_t stride;
  int count;

  METHOD void start_loading(KVTile& to, int row0 SITE) const {
    load_tile_async<THREADS>(to, g + row0 * stride, stride, count - row0, HEAD_DIM, threadIdx.x AT_SITE);
    cp_async_commit(ONLY_AT_SITE);
  }
};

/// A block's queries, from m0 on, and what they see.
struct Queries {
  int m0, rows, M, N;

  /// Keys before `whole` are seen by all of them, keys from `seen` on by none.
  METHOD int whole() const { return visible_keys(CAUSAL, m0, M, N); }
  METHOD int seen() const { return max(visible_keys(CAUSAL, m0 + rows - 1, M, N), 0); }

  /// σ Q Kᵀ of the warp's rows and the keys from key0 on, masked.
  METHOD void scores(Accumulator<MMA_M, TILE_N>& r_s, const QTile& q, const KVTile& k, int key0,
                     float sigma SITE) const {
    r_s.clear();
    multiply_abt<Element>(r_s, q, warp_id() * MMA_M, k AT_SITE);
    scale(r_s, sigma);
    if (key0 + TILE_N > whole()) mask_scores(r_s, CAUSAL, m0 + warp_id() * MMA_M, key0, M, N);
  }
};

/// Every other eight rows of the warp's output times what belongs to this lane's.
DEVICE void scale_half(Output& r_o, int half, float factor) {
#pragma unroll
  for (int n = 0; n < Output::N_TILES; ++n)
    r_o.tile[0][n][2 * half] *= factor, r_o.tile[0][n][2 * half + 1] *= factor;
}

/// Leaves the warp's scores in its rows.
DEVICE void store_scores(Scores& s, const Accumulator<MMA_M, TILE_N>& r_s SITE) {
  for_pairs(r_s, [&](int row, int col, float a, float b) {
    s.store(warp_id() * MMA_M + row, col, a, b AT_SITE);
  });
}

/// This lane's scores of one row: col 2·lane, 2·lane + 1, 2·lane + 64, …; −∞ from `cols` on.
DEVICE void load_row(Pair (&r_s)[PAIRS], const Scores (&s)[TILES], int row, int cols SITE) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int col = 2 * (i * WARP + lane_id());
    r_s[i] = col < cols ? s[col / TILE_N].load(row, col % TILE_N AT_SITE) : Pair{-INFINITY, -INFINITY};
  }
}

/// Their weights, in their places.
DEVICE void store_weights(Scores (&s)[TILES], const Pair (&r_s)[PAIRS], const SoftmaxRow& state, int row,
                          int cols SITE) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int col = 2 * (i * WARP + lane_id());
    const float a = state.weight(r_s[i].a, ONE), b = state.weight(r_s[i].b, ONE);
    if (col < cols) s[col / TILE_N].store(row, col % TILE_N, a, b AT_SITE);
  }
}

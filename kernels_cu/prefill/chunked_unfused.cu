// chunked_unfused: attention in chunks, as a host loop of small launches. It needs no M × N matrix, and is
// far too slow: every chunk pair's scores, weights and output pass through global memory.
//
//   for each chunk of queries, one after another, and each chunk of keys that a row of it sees:
//     scores    S = σ Q Kᵀ, masked scores −∞               grid (tiles of keys, tiles of queries, heads)
//     softmax   m' = max(m, max S)    factor = e^{m − m'}   P = e^{S − m'}, in the place of S
//               l = factor · l + Σ P                        grid (rows / ROW_WARPS, heads)
//     output    part = P V                                  grid (tiles of queries, 1, heads)
//     rescale   O' = factor · O' + part                     grid (rows / ROW_WARPS, heads)
//   finish      O = O' / l            LSE = m + ln l        grid (rows / ROW_WARPS, heads)
//
// CHUNK   queries and keys of a chunk; heads all B·H at once; the scratch holds one chunk pair, reused by
//         all. S lies there by rows or, BY_ROWS false, by columns
// block   `scores`, `output`: one tile, TILE_M × TILE_N or TILE_M × D, 16 rows a warp; the others: a row a
//         warp
// Sum     what O' and part are stored in: rounded to it once a chunk, so errors grow with the chunks
// bytes   for each pair S and P written and read, 4·sizeof(Element) a score, and 4·sizeof(Sum)·D a row (part
//         and O' written and read); K and V again for every tile of queries, Q for every tile of keys
#include "prefill/chunked.cuh"
#include "prim/mask.cuh"

constexpr int KEY_STEP = TILE_N < 64 ? TILE_N : 64;
constexpr int THREADS = TILE_M / MMA_M * WARP, ROW_WARPS = 4, ROW_THREADS = ROW_WARPS * WARP;

struct ScoresSmem {
  SmemTile<Element, TILE_M, D_PAD> q;
  SmemTile<Element, TILE_N, D_PAD> k;
};
struct OutputSmem {
  ScoreTile<TILE_M, KEY_STEP> p[2];
  SmemTile<Element, KEY_STEP, D_PAD> v[2];
};
static_assert(sizeof(ScoresSmem) == SCORES_SMEM_BYTES && sizeof(OutputSmem) == OUTPUT_SMEM_BYTES,
              "the plan's shared memory must be these structs");
static_assert(CHUNK % TILE_M == 0 && CHUNK % TILE_N == 0, "a tile must not reach into the next chunk");

/// `m0`, `rows`: the chunk of queries; `key0`, `keys`: the chunk of keys.
KERNEL(THREADS, 1)
chunked_scores(const View<const Element, 4> g_q, const View<const Element, 4> g_k, const View<Element, 3> g_s,
               int m0, int rows, int key0, int keys, int M, int N, int H, int GROUP, float sigma) {
  ScoresSmem& s = dynamic_smem<ScoresSmem>();
  const int row0 = blockIdx.y * TILE_M, col0 = blockIdx.x * TILE_N, head = blockIdx.z, b = head / H,
            h = head % H, warp_row = warp_id() * MMA_M;

  load_tile_async<THREADS>(s.q, g_q.at(b, m0 + row0, h), g_q.stride[1], rows - row0, HEAD_DIM, threadIdx.x);
  load_tile_async<THREADS>(s.k, g_k.at(b, key0 + col0, h / GROUP), g_k.stride[1], keys - col0, HEAD_DIM,
                           threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  block_sync();

  Accumulator<MMA_M, TILE_N> r_s;
  r_s.clear();
  multiply_abt<Element>(r_s, s.q, warp_row, s.k);
  scale(r_s, sigma);
  mask_scores(r_s, CAUSAL, m0 + row0 + warp_row, key0 + col0, M, N);
  for_pairs(r_s, [&](int row, int col, float a, float b) {
    row += row0 + warp_row, col += col0;
    // NOTE: rows of P are read 16 bytes at a time; what lies behind the keys becomes 0.
    if (row < rows && col < round_up(keys, 8)) store_scores(g_s, head, row, col, a, b);
  });
}

/// `cols`: the keys of the chunk, rounded up to 8; `first`: nothing was summed before.
KERNEL(ROW_THREADS, 1)
chunked_softmax(const View<Element, 3> g_s, const View<float, 2> g_m, const View<float, 2> g_l,
                const View<float, 2> g_factor, int rows, int cols, int first) {
  const int row = blockIdx.x * ROW_WARPS + warp_id(), head = blockIdx.y;
  if (row >= rows) return;

  Pair r_s[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int col = 2 * (i * WARP + lane_id());
    r_s[i] = col < cols ? load_scores(g_s, head, row, col) : Pair{-INFINITY, -INFINITY};
  }
  SoftmaxRow state;
  if (!first) state = {load_for_warp(g_m.at(head) + row), load_for_warp(g_l.at(head) + row)};
  const float factor = take_chunk(state, r_s);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int col = 2 * (i * WARP + lane_id());
    if (col < cols)
      store_scores(g_s, head, row, col, state.weight(r_s[i].a, ONE), state.weight(r_s[i].b, ONE));
  }
  if (lane_id() == 0) {
    store_global(g_m.at(head) + row, state.m), store_global(g_l.at(head) + row, state.l);
    store_global(g_factor.at(head) + row, factor);
  }
}

/// Starts loading columns `at`… of P and these keys of V.
DEVICE void load_step(OutputSmem& s, int stage, const View<Element, 3>& g_p, const Element* g_v,
                      int64_t stride_v, int head, int row0, int at, int rows, int keys SITE) {
  load_scores_async<THREADS>(s.p[stage], g_p, head, row0, at, rows - row0, round_up(keys, 8) - at AT_SITE);
  load_tile_async<THREADS>(s.v[stage], g_v + at * stride_v, stride_v, keys - at, HEAD_DIM,
                           threadIdx.x AT_SITE);
  cp_async_commit(ONLY_AT_SITE);
}

KERNEL(THREADS, 1)
chunked_output(const View<Element, 3> g_p, const View<const Element, 4> g_v, const View<Sum, 3> g_part,
               int rows, int key0, int keys, int H, int GROUP) {
  OutputSmem& s = dynamic_smem<OutputSmem>();
  const int row0 = blockIdx.x * TILE_M, head = blockIdx.z, warp_row = warp_id() * MMA_M,
            steps = ceil_div(keys, KEY_STEP);
  const Element* v = g_v.at(head / H, key0, head % H / GROUP);

  Accumulator<MMA_M, D_PAD> r_o;
  r_o.clear();
  load_step(s, 0, g_p, v, g_v.stride[1], head, row0, 0, rows, keys);
#pragma unroll 1
  for (int j = 0; j < steps; ++j) {
    cp_async_wait<0>();
    block_sync();
    if (j + 1 < steps)
      load_step(s, (j + 1) % 2, g_p, v, g_v.stride[1], head, row0, (j + 1) * KEY_STEP, rows, keys);
    multiply_ab<Element>(r_o, s.p[j % 2], warp_row, s.v[j % 2]);
  }
  store_rows(g_part.at(head, row0 + warp_row), g_part.stride[1], r_o, rows - row0 - warp_row, HEAD_DIM);
}

KERNEL(ROW_THREADS, 1)
chunked_rescale(const View<const Sum, 3> g_part, const View<const float, 2> g_factor,
                const View<Sum, 3> g_sum, int rows, int first) {
  const int row = blockIdx.x * ROW_WARPS + warp_id(), head = blockIdx.y;
  if (row >= rows) return;
  const float factor = first ? 0.f : load_for_warp(g_factor.at(head) + row);
  const Sum* g_new = g_part.at(head, row);
  Sum* g_old = g_sum.at(head, row);
  for (int col = 2 * lane_id(); col < HEAD_DIM; col += 2 * WARP) {
    Pair o = load_pair(g_new + col);
    if (!first) {
      const Pair before = load_pair(g_old + col);
      o = {before.a * factor + o.a, before.b * factor + o.b};
    }
    store_pair(g_old + col, o.a, o.b);
  }
}

/// `empty`: no row of the chunk sees a key, and the scratch holds somebody else's.
KERNEL(ROW_THREADS, 1)
chunked_finish(const View<const Sum, 3> g_sum, const View<const float, 2> g_m, const View<const float, 2> g_l,
               const View<Element, 4> g_o, const View<float, 3> g_lse, int m0, int rows, int H, int empty) {
  const int row = blockIdx.x * ROW_WARPS + warp_id(), head = blockIdx.y, b = head / H, h = head % H;
  if (row >= rows) return;
  SoftmaxRow state;
  if (!empty) state = {load_for_warp(g_m.at(head) + row), load_for_warp(g_l.at(head) + row)};
  const float inverse = state.inverse_sum();
  for (int col = 2 * lane_id(); col < HEAD_DIM; col += 2 * WARP) {
    const Pair o = empty ? Pair{0.f, 0.f} : load_pair(g_sum.at(head, row) + col);
    store_pair(g_o.at(b, m0 + row, h) + col, o.a * inverse, o.b * inverse);
  }
  if (lane_id() == 0) store_global(g_lse.at(b, h) + m0 + row, state.lse(1.f));
}

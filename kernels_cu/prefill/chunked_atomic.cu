// chunked_atomic: chunks of keys side by side too. Every (slice of queries, chunk of keys) is a block of its
// own, and they add to one O with float32 atomics, in any order: the last bits differ from run to run.
//
//   clear     m = −∞, l = 0, O' = 0                                       grid (rows / ROW_WARPS, heads)
//   max       S = σ Q Kᵀ        m = max(m, max S), atomically             grid (slices, chunks, heads)
//   add       S again           P = e^{S − m}      l += Σ P   O' += P V   grid (slices, chunks, heads)
//
// and chunked_finish of chunked_unfused.cu: O = O' / l, LSE = m + ln l.
//
// block   a slice: TILE_M rows, so few that TILE_M × CHUNK weights fit into shared memory; 16 rows a warp
// bytes   Q twice for every chunk it sees, K twice and V for every slice; O', m and l cleared and read;
//         atomics come on top, D + 2 a row and chunk
// NOTE: weights can be added up only under one maximum. To rescale what others add to takes a lock; the
// scores a second time take arithmetic alone.
#include "prefill/slice.cuh"
#include "prim/atomic.cuh"

constexpr int ROW_WARPS = 4, ROW_THREADS = ROW_WARPS * WARP;

struct MaxSmem {
  QTile q;
  KVTile tile[2];
};
struct AddSmem {
  Scores p[TILES];
  QTile q;
  KVTile tile[2];
};
static_assert(sizeof(MaxSmem) == MAX_SMEM_BYTES && sizeof(AddSmem) == ADD_SMEM_BYTES,
              "the plan's shared memory must be these structs");

KERNEL(ROW_THREADS, 1)
chunked_clear(const View<float, 2> g_m, const View<float, 2> g_l, const View<float, 3> g_sum, int rows) {
  const int row = blockIdx.x * ROW_WARPS + warp_id(), head = blockIdx.y;
  if (row >= rows) return;
  for (int col = 2 * lane_id(); col < HEAD_DIM; col += 2 * WARP)
    store_pair(g_sum.at(head, row) + col, 0.f, 0.f);
  const SoftmaxRow none;
  if (lane_id() == 0) store_global(g_m.at(head) + row, none.m), store_global(g_l.at(head) + row, none.l);
}

KERNEL(THREADS, 1)
chunked_max(const View<const Element, 4> g_q, const View<const Element, 4> g_k, const View<float, 2> g_m,
            int M, int N, int H, int GROUP, float sigma) {
  MaxSmem& s = dynamic_smem<MaxSmem>();
  const int m0 = blockIdx.x * TILE_M, key0 = blockIdx.y * CHUNK, head = blockIdx.z, b = head / H,
            h = head % H;
  const Queries queries{m0, min(M - m0, TILE_M), M, N};
  if (key0 >= queries.seen()) return;
  const Rows keys{g_k.at(b, 0, h / GROUP), g_k.stride[1], N};
  const int tiles = ceil_div(min(N - key0, CHUNK), TILE_N);

  load_tile_async<THREADS>(s.q, g_q.at(b, m0, h), g_q.stride[1], queries.rows, HEAD_DIM, threadIdx.x);
  keys.start_loading(s.tile[0], key0);
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
  for (int j = 0; j < tiles; ++j) {
    cp_async_wait<0>();
    block_sync();
    if (j + 1 < tiles) keys.start_loading(s.tile[(j + 1) % 2], key0 + (j + 1) * TILE_N);
    Accumulator<MMA_M, TILE_N> r_s;
    queries.scores(r_s, s.q, s.tile[j % 2], key0 + j * TILE_N, sigma);
#pragma unroll
    for (int n = 0; n < r_s.N_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], r_s.tile[0][n][e]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_id() * MMA_M + Output::row(0, half);
    const float most = to_float(from_float<Element>(quad_max(top[half])));  // as the scores are rounded
    if (lane_id() % 4 == 0 && row < queries.rows) atomic_max(g_m.at(head) + m0 + row, most);
  }
}

KERNEL(THREADS, 1)
chunked_add(const View<const Element, 4> g_q, const View<const Element, 4> g_k,
            const View<const Element, 4> g_v, const View<const float, 2> g_m, const View<float, 2> g_l,
            const View<float, 3> g_sum, int M, int N, int H, int GROUP, float sigma) {
  AddSmem& s = dynamic_smem<AddSmem>();
  const int m0 = blockIdx.x * TILE_M, key0 = blockIdx.y * CHUNK, head = blockIdx.z, b = head / H,
            h = head % H, warp_row = warp_id() * MMA_M;
  const Queries queries{m0, min(M - m0, TILE_M), M, N};
  if (key0 >= queries.seen()) return;
  const Rows keys{g_k.at(b, 0, h / GROUP), g_k.stride[1], N};
  const Rows values{g_v.at(b, 0, h / GROUP), g_v.stride[1], N};
  const int tiles = ceil_div(min(N - key0, CHUNK), TILE_N);

  load_tile_async<THREADS>(s.q, g_q.at(b, m0, h), g_q.stride[1], queries.rows, HEAD_DIM, threadIdx.x);
  keys.start_loading(s.tile[0], key0);
  Output r_o;
  r_o.clear();
#pragma unroll 1
  for (int j = 0; j < 2 * tiles; ++j) {  // keys, then values
    cp_async_wait<0>();
    block_sync();
    const int next = j + 1;
    if (next < tiles) keys.start_loading(s.tile[next % 2], key0 + next * TILE_N);
    else if (next < 2 * tiles) values.start_loading(s.tile[next % 2], key0 + (next - tiles) * TILE_N);
    if (j < tiles) {
      Accumulator<MMA_M, TILE_N> r_s;
      queries.scores(r_s, s.q, s.tile[j % 2], key0 + j * TILE_N, sigma);
      store_scores(s.p[j], r_s);
      continue;
    }
    if (j == tiles) {
#pragma unroll 1
      for (int row = warp_row; row < min(warp_row + MMA_M, queries.rows); ++row) {
        Pair r_s[PAIRS];
        load_row(r_s, s.p, row, tiles * TILE_N);
        SoftmaxRow state(load_for_warp(g_m.at(head) + m0 + row), 0.f);
        store_weights(s.p, r_s, state, row, tiles * TILE_N);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) state.l += state.weight(r_s[i].a, ONE) + state.weight(r_s[i].b, ONE);
        state = merge_lanes(state, ONE);
        if (lane_id() == 0) atomic_add(g_l.at(head) + m0 + row, state.l);
      }
      warp_sync();
    }
    multiply_ab<Element>(r_o, s.p[j - tiles], warp_row, s.tile[j % 2]);
  }
  for_pairs(r_o, [&](int row, int col, float a, float b) {
    row += warp_row;
    if (row >= queries.rows || col >= HEAD_DIM) return;
    atomic_add(g_sum.at(head, m0 + row) + col, a), atomic_add(g_sum.at(head, m0 + row) + col + 1, b);
  });
}

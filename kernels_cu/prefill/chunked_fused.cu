// chunked_fused: chunked attention repaired. The softmax of a chunk's scores, P V and the rescaling are one
// kernel, and then the scores never leave the chip.
//
//   chunked_pair    one launch a chunk pair, after the scores pass of chunked_unfused.cu: S from global
//                   memory, P = e^{S − m'}, O' = e^{m − m'} O' + P V, with m, l and O' kept there
//   chunked_slice   one launch for all chunks of keys: S = σ Q Kᵀ too, into shared memory; O' in registers,
//                   O / l and the LSE at the end
//
// grid    (slices, 1, heads): of one chunk of queries, or of all queries
// block   a slice: TILE_M rows, so few that TILE_M × CHUNK scores fit into shared memory; 16 rows a warp
// smem    the slice's scores and weights, as a chunk's tiles of TILE_N keys; two tiles of K or V: one lands
//         while the other is multiplied; `chunked_slice` also Q
// Sum     O' is rounded to it once a chunk: where it is stored, and in registers all the same
// bytes   `chunked_pair`: S once, V for every slice, O' read and written; `chunked_slice`: Q once, K and V
//         for every slice up to the end of its last chunk, O and LSE
#include "prefill/slice.cuh"

/// A slice's scores, its rows' softmax so far, and tiles of keys or values passing by.
struct Slice {
  Scores p[TILES];
  float m[TILE_M], l[TILE_M], factor[TILE_M];
  KVTile tile[2];
};
struct SliceSmem {
  Slice slice;
  QTile q;
};
static_assert(sizeof(Slice) == PAIR_SMEM_BYTES && sizeof(SliceSmem) == SLICE_SMEM_BYTES,
              "the plan's shared memory must be these structs");

/// Turns the first `cols` scores of each of the warp's rows into weights, in place, and O' to the new
/// maximum.
DEVICE void weigh_chunk(Slice& s, Output& r_o, int cols SITE) {
  const int warp_row = warp_id() * MMA_M;
#pragma unroll 1
  for (int row = warp_row; row < warp_row + MMA_M; ++row) {
    Pair r_s[PAIRS];
    load_row(r_s, s.p, row, cols AT_SITE);
    SoftmaxRow state;
    if (lane_id() == 0) state = {load_shared(&s.m[row] AT_SITE), load_shared(&s.l[row] AT_SITE)};
    state = {shuffle(state.m, 0 AT_SITE), shuffle(state.l, 0 AT_SITE)};
    const float factor = take_chunk(state, r_s AT_SITE);
    store_weights(s.p, r_s, state, row, cols AT_SITE);
    if (lane_id() == 0) {
      store_shared(&s.m[row], state.m AT_SITE), store_shared(&s.l[row], state.l AT_SITE);
      store_shared(&s.factor[row], factor AT_SITE);
    }
  }
  warp_sync(ONLY_AT_SITE);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    scale_half(r_o, half, load_shared(&s.factor[warp_row + r_o.row(0, half)] AT_SITE));
}

KERNEL(THREADS, 1)
chunked_pair(const View<Element, 3> g_s, const View<const Element, 4> g_v, const View<float, 2> g_m,
             const View<float, 2> g_l, const View<Sum, 3> g_sum, int rows, int key0, int keys, int H,
             int GROUP, int first) {
  Slice& s = dynamic_smem<Slice>();
  const int row0 = blockIdx.x * TILE_M, head = blockIdx.z, warp_row = warp_id() * MMA_M,
            row = row0 + warp_row + lane_id(), tiles = ceil_div(keys, TILE_N), cols = round_up(keys, 8);
  const bool mine = lane_id() < MMA_M && row < rows;  // a lane a row
  const Rows values{g_v.at(head / H, key0, head % H / GROUP), g_v.stride[1], keys};

#pragma unroll
  for (int j = 0; j < TILES; ++j)
    if (j < tiles)
      load_scores_async<THREADS>(s.p[j], g_s, head, row0, j * TILE_N, rows - row0, cols - j * TILE_N);
  values.start_loading(s.tile[0], 0);
  if (lane_id() < MMA_M) {
    SoftmaxRow state;
    if (mine && !first) state = {load_global(g_m.at(head) + row), load_global(g_l.at(head) + row)};
    store_shared(&s.m[warp_row + lane_id()], state.m), store_shared(&s.l[warp_row + lane_id()], state.l);
  }
  Output r_o;
  load_rows(r_o, g_sum.at(head, row0 + warp_row), g_sum.stride[1], first ? 0 : rows - row0 - warp_row,
            HEAD_DIM);
  cp_async_wait<0>();
  block_sync();
  weigh_chunk(s, r_o, cols);

#pragma unroll 1
  for (int j = 0; j < tiles; ++j) {
    if (j > 0) {
      cp_async_wait<0>();
      block_sync();
    }
    if (j + 1 < tiles) values.start_loading(s.tile[(j + 1) % 2], (j + 1) * TILE_N);
    multiply_ab<Element>(r_o, s.p[j], warp_row, s.tile[j % 2]);
  }
  store_rows(g_sum.at(head, row0 + warp_row), g_sum.stride[1], r_o, rows - row0 - warp_row, HEAD_DIM);
  if (mine) {
    store_global(g_m.at(head) + row, load_shared(&s.m[warp_row + lane_id()]));
    store_global(g_l.at(head) + row, load_shared(&s.l[warp_row + lane_id()]));
  }
}

/// `m0`, `rows`: the queries of this launch.
KERNEL(THREADS, 1)
chunked_slice(const View<const Element, 4> g_q, const View<const Element, 4> g_k,
              const View<const Element, 4> g_v, const View<Element, 4> g_o, const View<float, 3> g_lse,
              int m0, int rows, int M, int N, int H, int GROUP, float sigma) {
  SliceSmem& smem = dynamic_smem<SliceSmem>();
  Slice& s = smem.slice;
  const int slice = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x, head = blockIdx.z, b = head / H,
            h = head % H, warp_row = warp_id() * MMA_M;
  const Queries queries{m0 + slice * TILE_M, min(rows - slice * TILE_M, TILE_M), M, N};
  const Rows keys{g_k.at(b, 0, h / GROUP), g_k.stride[1], N};
  const Rows values{g_v.at(b, 0, h / GROUP), g_v.stride[1], N};
  const int seen = queries.seen();

  if (seen > 0) {
    load_tile_async<THREADS>(smem.q, g_q.at(b, queries.m0, h), g_q.stride[1], queries.rows, HEAD_DIM,
                             threadIdx.x);
    keys.start_loading(s.tile[0], 0);
  }
  if (lane_id() < MMA_M) {
    const SoftmaxRow none;
    store_shared(&s.m[warp_row + lane_id()], none.m), store_shared(&s.l[warp_row + lane_id()], none.l);
  }
  Output r_o;
  r_o.clear();

#pragma unroll 1
  for (int key0 = 0; key0 < seen; key0 += CHUNK) {
    const int tiles = ceil_div(min(N - key0, CHUNK), TILE_N);
#pragma unroll 1
    for (int j = 0; j < 2 * tiles; ++j) {  // the chunk's keys, then its values
      cp_async_wait<0>();
      block_sync();
      const int next = j + 1;
      KVTile &here = s.tile[j % 2], &coming = s.tile[next % 2];
      if (next < tiles) keys.start_loading(coming, key0 + next * TILE_N);
      else if (next < 2 * tiles) values.start_loading(coming, key0 + (next - tiles) * TILE_N);
      else if (key0 + CHUNK < seen) keys.start_loading(coming, key0 + CHUNK);
      if (j < tiles) {
        Accumulator<MMA_M, TILE_N> r_s;
        queries.scores(r_s, smem.q, here, key0 + j * TILE_N, sigma);
        store_scores(s.p[j], r_s);
        continue;
      }
      if (j == tiles) weigh_chunk(s, r_o, tiles * TILE_N);
      multiply_ab<Element>(r_o, s.p[j - tiles], warp_row, here);
    }
    round_to<Sum>(r_o);
  }

  warp_sync();  // NOTE: without keys nobody has waited for the first m and l
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + r_o.row(0, half);
    const SoftmaxRow state{load_shared(&s.m[row]), load_shared(&s.l[row])};
    scale_half(r_o, half, state.inverse_sum());
    if (row < queries.rows && lane_id() % 4 == 0)
      store_global(g_lse.at(b, h) + queries.m0 + row, state.lse(1.f));
  }
  store_rows(g_o.at(b, queries.m0 + warp_row, h), g_o.stride[1], r_o, queries.rows - warp_row, HEAD_DIM);
}

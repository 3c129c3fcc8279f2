// chunked_fused: chunked attention repaired. The softmax of a chunk's scores, P V and the rescaling are one kernel,
// and then the scores never leave the chip.
//
//   chunked_pair    one launch a chunk pair, after the scores pass of chunked_unfused.cu: S from global memory,
//                   P = e^{S − m'}, O' = e^{m − m'} O' + P V, with m, l and O' kept there between launches
//   chunked_slice   one launch for all chunks of keys: S = σ Q Kᵀ too, into shared memory; O' in registers,
//                   O / l and the LSE at the end
//
// grid    (slices, 1, heads): of one chunk of queries, or of all queries
// block   a slice: TILE_M rows, so few that TILE_M × CHUNK scores fit into shared memory; 16 rows a warp
// smem    the slice's scores and weights, as a chunk's tiles of TILE_N keys; two tiles of K or V, of which one lands
//         while the other is multiplied; `chunked_slice` also Q
// Sum     O' is rounded to it once a chunk: where it is stored, and in registers all the same
// bytes   `chunked_pair`: S once, V for every slice, O' read and written; `chunked_slice`: Q once, K and V for
//         every slice up to the end of its last chunk, O and LSE
#include "prefill/chunked.cuh"
#include "prim/mask.cuh"

constexpr int THREADS = TILE_M / MMA_M * WARP, TILES = CHUNK / TILE_N;
static_assert(CHUNK % TILE_N == 0, "a tile must not reach into the next chunk");

/// TILE_M rows of one chunk's scores, the rows' softmax so far, and tiles of keys or values passing by.
struct Slice {
  ScoreTile<TILE_M, TILE_N> p[TILES];
  float m[TILE_M], l[TILE_M], factor[TILE_M];
  SmemTile<Element, TILE_N, D_PAD> tile[2];
};
struct SliceSmem {
  Slice slice;
  SmemTile<Element, TILE_M, D_PAD> q;
};
static_assert(sizeof(Slice) == PAIR_SMEM_BYTES && sizeof(SliceSmem) == SLICE_SMEM_BYTES,
              "the plan's shared memory must be these structs");

using Output = Accumulator<MMA_M, D_PAD>;

/// The keys or the values of one head.
struct Rows {
  const Element* g;
  int64_t stride;
  int count;

  METHOD void start_loading(Slice& s, int stage, int row0 SITE) const {
    load_tile_async<THREADS>(s.tile[stage], g + row0 * stride, stride, count - row0, HEAD_DIM,
                             threadIdx.x AT_SITE);
    cp_async_commit(ONLY_AT_SITE);
  }
};

/// Turns the first `cols` scores of each of the warp's rows into weights, in place, and O' to the new maximum.
DEVICE void weigh_chunk(Slice& s, Output& r_o, int cols SITE) {
  const int warp_row = warp_id() * MMA_M;
#pragma unroll 1
  for (int row = warp_row; row < warp_row + MMA_M; ++row) {
    Pair r_s[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int col = 2 * (i * WARP + lane_id());
      r_s[i] = col < cols ? s.p[col / TILE_N].load(row, col % TILE_N AT_SITE) : Pair{-INFINITY, -INFINITY};
    }
    SoftmaxRow state;
    if (lane_id() == 0) state = {load_shared(&s.m[row] AT_SITE), load_shared(&s.l[row] AT_SITE)};
    state = {shuffle(state.m, 0 AT_SITE), shuffle(state.l, 0 AT_SITE)};
    const float factor = take_chunk(state, r_s AT_SITE);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int col = 2 * (i * WARP + lane_id());
      if (col < cols)
        s.p[col / TILE_N].store(row, col % TILE_N, state.weight(r_s[i].a, ONE), state.weight(r_s[i].b, ONE)
                                AT_SITE);
    }
    if (lane_id() == 0) {
      store_shared(&s.m[row], state.m AT_SITE), store_shared(&s.l[row], state.l AT_SITE);
      store_shared(&s.factor[row], factor AT_SITE);
    }
  }
  warp_sync(ONLY_AT_SITE);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = load_shared(&s.factor[warp_row + r_o.row(0, half)] AT_SITE);
#pragma unroll
    for (int n = 0; n < r_o.N_TILES; ++n) r_o.tile[0][n][2 * half] *= factor, r_o.tile[0][n][2 * half + 1] *= factor;
  }
}

KERNEL(THREADS, 1)
chunked_pair(const View<Element, 3> g_s, const View<const Element, 4> g_v, const View<float, 2> g_m,
             const View<float, 2> g_l, const View<Sum, 3> g_sum, int rows, int key0, int keys, int H, int GROUP,
             int first) {
  Slice& s = dynamic_smem<Slice>();
  const int row0 = blockIdx.x * TILE_M, head = blockIdx.z, warp_row = warp_id() * MMA_M,
            row = row0 + warp_row + lane_id(), tiles = ceil_div(keys, TILE_N), cols = round_up(keys, 8);
  const bool mine = lane_id() < MMA_M && row < rows;  // a lane a row
  const Rows values{g_v.at(head / H, key0, head % H / GROUP), g_v.stride[1], keys};

#pragma unroll
  for (int j = 0; j < TILES; ++j)
    if (j < tiles)
      load_scores_async<THREADS>(s.p[j], g_s, head, row0, j * TILE_N, rows - row0, cols - j * TILE_N);
  values.start_loading(s, 0, 0);
  if (lane_id() < MMA_M) {
    const SoftmaxRow state = mine && !first ? SoftmaxRow(load_global(g_m.at(head) + row), load_global(g_l.at(head) + row))
                                            : SoftmaxRow();
    store_shared(&s.m[warp_row + lane_id()], state.m), store_shared(&s.l[warp_row + lane_id()], state.l);
  }
  Output r_o;
  load_rows(r_o, g_sum.at(head, row0 + warp_row), g_sum.stride[1], first ? 0 : rows - row0 - warp_row, HEAD_DIM);
  cp_async_wait<0>();
  block_sync();
  weigh_chunk(s, r_o, cols);

#pragma unroll 1
  for (int j = 0; j < tiles; ++j) {
    if (j > 0) {
      cp_async_wait<0>();
      block_sync();
    }
    if (j + 1 < tiles) values.start_loading(s, (j + 1) % 2, (j + 1) * TILE_N);
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
chunked_slice(const View<const Element, 4> g_q, const View<const Element, 4> g_k, const View<const Element, 4> g_v,
              const View<Element, 4> g_o, const View<float, 3> g_lse, int m0, int rows, int M, int N, int H,
              int GROUP, float sigma) {
  SliceSmem& smem = dynamic_smem<SliceSmem>();
  Slice& s = smem.slice;
  const int slice = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x, row0 = slice * TILE_M, head = blockIdx.z,
            b = head / H, h = head % H, warp_row = warp_id() * MMA_M, here = min(rows - row0, TILE_M);
  const Rows keys{g_k.at(b, 0, h / GROUP), g_k.stride[1], N}, values{g_v.at(b, 0, h / GROUP), g_v.stride[1], N};
  m0 += row0;
  // Whole chunks that some row sees; of the keys before `whole` every row sees all.
  const int seen = max(visible_keys(CAUSAL, m0 + here - 1, M, N), 0), whole = visible_keys(CAUSAL, m0, M, N);

  if (seen > 0) {
    load_tile_async<THREADS>(smem.q, g_q.at(b, m0, h), g_q.stride[1], here, HEAD_DIM, threadIdx.x);
    keys.start_loading(s, 0, 0);
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
      const int next = j + 1, stage = next % 2;
      if (next < tiles) keys.start_loading(s, stage, key0 + next * TILE_N);
      else if (next < 2 * tiles) values.start_loading(s, stage, key0 + (next - tiles) * TILE_N);
      else if (key0 + CHUNK < seen) keys.start_loading(s, stage, key0 + CHUNK);
      if (j < tiles) {
        Accumulator<MMA_M, TILE_N> r_s;
        r_s.clear();
        multiply_abt<Element>(r_s, smem.q, warp_row, s.tile[j % 2]);
        scale(r_s, sigma);
        const int col0 = key0 + j * TILE_N;
        if (col0 + TILE_N > whole) mask_scores(r_s, CAUSAL, m0 + warp_row, col0, M, N);
        for_pairs(r_s, [&](int row, int col, float a, float b) { s.p[j].store(warp_row + row, col, a, b); });
        continue;
      }
      if (j == tiles) weigh_chunk(s, r_o, tiles * TILE_N);
      multiply_ab<Element>(r_o, s.p[j - tiles], warp_row, s.tile[j % 2]);
    }
    round_to<Sum>(r_o);
  }

  warp_sync();  // NOTE: without keys nobody has waited for the first m and l
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + r_o.row(0, half);
    const SoftmaxRow state{load_shared(&s.m[row]), load_shared(&s.l[row])};
    const float inverse = state.inverse_sum();
#pragma unroll
    for (int n = 0; n < r_o.N_TILES; ++n)
      r_o.tile[0][n][2 * half] *= inverse, r_o.tile[0][n][2 * half + 1] *= inverse;
    if (row < here && lane_id() % 4 == 0) store_global(g_lse.at(b, h) + m0 + row, state.lse(1.f));
  }
  store_rows(g_o.at(b, m0 + warp_row, h), g_o.stride[1], r_o, here - warp_row, HEAD_DIM);
}

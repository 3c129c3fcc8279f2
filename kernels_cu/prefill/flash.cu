// flash: FlashAttention-2 forward (Dao 2023). One pass over the keys; scores never leave the registers.
//
//   for each tile of keys:   S = Q Kᵀ        m' = max(m, rowmax S)        P = e^{σ(S − m')}
//                            l = e^{σ(m − m')} l + rowsum P        O = e^{σ(m − m')} O + P V
//   at the end:              O / l           LSE = σ m + ln l
//
// and where they are compiled in
//   WINDOW    a query sees `left` keys before its own and `right` behind
//   SOFTCAP   S = tanh(σ Q Kᵀ / cap), and from there on σ = cap
//   SINKS     m = sink / σ and l = 1 before the first tile
//   VARLEN    each sequence has an M and N of its own; they lie one behind the other
//   PAGE_SIZE keys and values lie in pages, which row b of a table lists for sequence b; their offsets say only
//             how many there are
//
// grid    (ceil(M / BLOCK_M), H, B); with a causal mask the longest tiles start first
// block   WARPS warps; a warp owns BLOCK_M / WARPS query rows and, of these, whole rows of S and O in
//         registers
// smem    one tile of Q, STAGES tiles of K and of V: the next tile lands while this one is multiplied
// bytes   a block reads its Q tile once and every visible row of K and V once, and writes its O tile and LSE
//         once; nothing of tiles that all its queries do not see
#include "prim/packed.cuh"
#include "prim/paged_tile.cuh"
#include "prim/sight.cuh"
#include "prim/sink.cuh"
#include "prim/softcap.cuh"
#include "prim/softmax.cuh"
#include "prim/tile.cuh"

constexpr int D_PAD = round_up(HEAD_DIM, MMA_K), DV_PAD = round_up(VALUE_DIM, MMA_K);
constexpr int THREADS = WARPS * WARP, WARP_M = BLOCK_M / WARPS, STAGES = 2;

using QTile = SmemTile<Element, BLOCK_M, D_PAD>;
using KTile = SmemTile<Element, BLOCK_N, D_PAD>;
using VTile = SmemTile<Element, BLOCK_N, DV_PAD>;
struct Smem {
  QTile q;
  KTile k[STAGES];
  VTile v[STAGES];
};
static_assert(DV_PAD <= D_PAD, "O takes the place of Q");
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// One block's view of its keys: tile j is rows j·BLOCK_N… of one KV head.
struct Keys {
  const Element *g_k, *g_v;
  int64_t stride_k_n, stride_v_n;
  int N;

  METHOD void start_loading(Smem& s, int j SITE) const {
    int key0 = j * BLOCK_N, stage = j % STAGES;
    load_tile_async<THREADS>(s.k[stage], g_k + key0 * stride_k_n, stride_k_n, N - key0, HEAD_DIM,
                             threadIdx.x AT_SITE);
    load_tile_async<THREADS>(s.v[stage], g_v + key0 * stride_v_n, stride_v_n, N - key0, VALUE_DIM,
                             threadIdx.x AT_SITE);
    cp_async_commit(ONLY_AT_SITE);
  }
};

/// The same where they lie in pages.
struct PagedKeys {
  const View<const Element, 4>&g_k, &g_v;
  const int* g_pages;
  int hkv, N;

  METHOD void start_loading(Smem& s, int j SITE) const {
    int key0 = j * BLOCK_N, stage = j % STAGES;
    load_paged_tile_async<THREADS, PAGE_SIZE>(s.k[stage], g_k, g_pages, hkv, key0, N - key0, HEAD_DIM,
                                              threadIdx.x AT_SITE);
    load_paged_tile_async<THREADS, PAGE_SIZE>(s.v[stage], g_v, g_pages, hkv, key0, N - key0, VALUE_DIM,
                                              threadIdx.x AT_SITE);
    cp_async_commit(ONLY_AT_SITE);
  }
};

KERNEL(THREADS, BLOCKS_PER_SM)
flash(const View<const Element, 4> g_q, const View<const Element, 4> g_k, const View<const Element, 4> g_v,
      const View<Element, 4> g_o, const View<float, 3> g_lse, int M, int N, int GROUP, float sigma, int left,
      int right, float squash, const float* g_sinks, const int* g_begin_q, const int* g_begin_k,
      const View<const int, 2> g_table) {
  Smem& s = dynamic_smem<Smem>();
  const int tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x, h = blockIdx.y, i = blockIdx.z;
  const int m0 = tile * BLOCK_M, warp_row = warp_id() * WARP_M;
  const auto sequence = [&] {
    return VARLEN ? packed_sequence(g_begin_q, g_begin_k, i) : Sequence{i, i, 0, 0, M, N};
  };
  const Sequence seq = sequence();
  const int rows = min(seq.M - m0, BLOCK_M);
  if (VARLEN && rows <= 0) return;
  const int hkv = h / GROUP;
  const auto keys = [&] {
    if constexpr (PAGE_SIZE > 0)
      return PagedKeys{g_k, g_v, g_table.at(i), hkv, seq.N};
    else
      return Keys{g_k.at(seq.b, seq.k0, hkv), g_v.at(seq.b, seq.k0, hkv), g_k.stride[1], g_v.stride[1], seq.N};
  }();

  const Sight<CAUSAL, WINDOW> sight{seq.M, seq.N, left, right};
  const Tiles tiles = sight.tiles<BLOCK_N>(m0, m0 + rows - 1);

  load_tile_async<THREADS>(s.q, g_q.at(seq.b, seq.q0 + m0, h), g_q.stride[1], rows, HEAD_DIM, threadIdx.x);
  cp_async_commit();
  if (tiles.first < tiles.end) keys.start_loading(s, tiles.first);

  Accumulator<WARP_M, DV_PAD> r_o;
  Softmax<WARP_M> softmax;
  const float sigma2 = sigma * LOG2_E;
  r_o.clear();
  if constexpr (SINKS) begin_with_sink(softmax, g_sinks + h, sigma);

#pragma unroll 1
  for (int j = tiles.first; j < tiles.end; ++j) {
    cp_async_wait<0>();
    block_sync();  // tile j is here for all, and all have left tile j − 1, whose stage is free again
    if (j + 1 < tiles.end) keys.start_loading(s, j + 1);

    Accumulator<WARP_M, BLOCK_N> r_s;
    r_s.clear();
    multiply_abt<Element>(r_s, s.q, warp_row, s.k[j % STAGES]);
    if constexpr (SOFTCAP) cap_scores(r_s, squash);
    if (j < tiles.whole || j >= tiles.part) sight.mask(r_s, m0 + warp_row, j * BLOCK_N);
    softmax.update(r_s, r_o, sigma2);
    multiply_ab<Element>(r_o, r_s, s.v[j % STAGES]);
  }

  softmax.finish();
  softmax.normalise(r_o);
  const Sequence out = sequence();  // NOTE: asked again, because the loop has no registers to keep it in
  const int rows_out = min(out.M - m0, BLOCK_M);
  cp_async_wait<0>();
  block_sync();  // NOTE: without keys the copy of Q is still in flight, and O takes its place
  store_accumulator<Element>(s.q, warp_row, r_o);
  warp_sync();
  store_tile<WARP, WARP_M>(g_o.at(out.b, out.q0 + m0 + warp_row, h), g_o.stride[1], s.q, warp_row,
                           rows_out - warp_row, VALUE_DIM, lane_id());
#pragma unroll
  for (int m = 0; m < WARP_M / MMA_M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = warp_row + r_o.row(m, half);
      if (row < rows_out && lane_id() % 4 == 0)
        store_global(g_lse.at(out.b, h) + out.q0 + m0 + row, softmax.row[m][half].lse(sigma));
    }
}

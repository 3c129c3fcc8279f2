// paged: decode attention over a paged KV cache, the whole batch in one launch (vLLM's PagedAttention, Kwon
// et al. 2023, with FlashDecoding's split over keys and the query heads of one KV head packed into the rows
// of one tensor-core tile).
//
//   for each tile of keys:   S = Q Kᵀ        P = e^{σ(S − m)}        O = e^{σ(m_old − m)} O + P V
//   with the M · GROUP queries and heads that share K and V as the rows of Q (rows.cuh)
//
// and where they are compiled in, as in flash.cu: CAUSAL among the last M tokens, WINDOW, SOFTCAP, SINKS
//
// grid    (splits, HKV · ceil(M · GROUP / 16), B); split s of a sequence takes an equal share of the keys that
//         some query sees, in whole tiles; a sink is in the first one's
// block   WARPS warps; each walks its own tiles (every WARPS-th) with its own ring of STAGES tiles in flight,
//         no block barrier in the loop; the warps' states merge at the end. Several splits: partial O and
//         LSE, merged by combine.cu
// smem    Q, and the rings, which the warps' partial states take over at the end
// bytes   the K and V row of every key that some query sees, once a KV head (once for each 16 rows of Q), its
//         page number, Q, O
#include "decode/rows.cuh"
#include "prim/paging.cuh"
#include "prim/softcap.cuh"
#include "prim/softmax.cuh"

constexpr int D_PAD = round_up(HEAD_DIM, MMA_K), KEYS = 16, THREADS = WARPS * WARP;

using KVTile = SmemTile<Element, KEYS, D_PAD>;
struct Stage {
  KVTile k, v;
};
struct State {  // one warp's m, l and O over its keys
  float m[MMA_M], l[MMA_M], o[MMA_M][D_PAD];
};
struct Smem {
  SmemTile<Element, MMA_M, D_PAD> q;
  union {
    Stage ring[WARPS][STAGES];
    State state[WARPS];
  };
};
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// One warp's walk over the keys [begin, end) of one sequence and KV head: its tile t starts at key0(t).
struct Walker {
  const View<const Element, 4>&g_k, &g_v;
  const int* g_pages;
  int hkv, begin, end;

  METHOD int key0(int t) const { return begin + (t * WARPS + warp_id()) * KEYS; }
  METHOD int tiles() const { return max(0, ceil_div(end - key0(0), WARPS * KEYS)); }

  /// Lane i < KEYS fetches the page of the tile's key i. NOTE: a tile ahead of its use, so that no copy waits
  /// for it.
  METHOD int fetch_pages(int t SITE) const {
    int key = key0(t) + lane_id();
    return lane_id() < KEYS && key < end ? page_of<PAGE_SIZE>(g_pages, key AT_SITE) : 0;
  }
  METHOD void start_loading(Stage& s, int t, int pages SITE) const {
    using W = Walk<WARP, D_PAD>;
    const W walk(lane_id());
#pragma unroll
    for (int i = 0; i < ceil_div(KEYS, W::ROW_STEP); ++i) {
      int row = walk.row + i * W::ROW_STEP, key = key0(t) + row, page = shuffle(pages, row % WARP AT_SITE);
      if (walk.rests() || row >= KEYS) continue;
      bool valid = key < end && walk.col < HEAD_DIM;
      cp_async16(s.k.at(row, walk.col), row_in_page<PAGE_SIZE>(g_k, page, key, hkv) + walk.col,
                 valid AT_SITE);
      cp_async16(s.v.at(row, walk.col), row_in_page<PAGE_SIZE>(g_v, page, key, hkv) + walk.col,
                 valid AT_SITE);
    }
  }
};

/// Leaves a warp's state in shared memory.
DEVICE void store_state(State& s, const Accumulator<MMA_M, D_PAD>& r_o, const Softmax<MMA_M>& softmax) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = r_o.row(0, half);
    if (lane_id() % 4 == 0) {
      store_shared(&s.m[row], softmax.row[0][half].m);
      store_shared(&s.l[row], softmax.row[0][half].l);
    }
#pragma unroll
    for (int n = 0; n < r_o.N_TILES; ++n)
      store_shared(reinterpret_cast<Pair*>(&s.o[row][r_o.col(n, 0)]),
                   Pair{r_o.tile[0][n][2 * half], r_o.tile[0][n][2 * half + 1]});
  }
}

KERNEL(THREADS, 1)
paged(const View<const Element, 4> g_q, const View<const Element, 4> g_k, const View<const Element, 4> g_v,
      const View<const int, 2> g_table, const int* g_lengths, const View<Output, 4> g_o,
      const View<float, 3> g_lse, float sigma, int left, int right, float squash, const float* g_sinks) {
  Smem& s = dynamic_smem<Smem>();
  const int split = blockIdx.x, b = blockIdx.z;
  const Rows rows(blockIdx.y / ROW_TILES, blockIdx.y % ROW_TILES);
  const int length = load_global(g_lengths + b), first = first_seen(length, left),
            share = round_up(ceil_div(length - first, int(gridDim.x)), WARPS * KEYS);
  const Walker keys{g_k, g_v, g_table.at(b), rows.hkv, min(first + split * share, length),
                    min(first + (split + 1) * share, length)};
  auto& ring = s.ring[warp_id()];

  rows.load_q<THREADS>(s.q, g_q, b, threadIdx.x);
  cp_async_commit();
  int pages = keys.fetch_pages(0);
#pragma unroll
  for (int t = 0; t < STAGES - 1; ++t) {
    int ahead = keys.fetch_pages(t + 1);
    keys.start_loading(ring[t], t, pages);
    cp_async_commit();
    pages = ahead;
  }
  cp_async_wait<STAGES - 1>();
  block_sync();  // Q is here

  Accumulator<MMA_M, D_PAD> r_o;
  Softmax<MMA_M> softmax;
  const float sigma2 = sigma * LOG2_E;
  r_o.clear();
  if (SINKS && split == 0 && warp_id() == 0) rows.begin_with_sinks(softmax, g_sinks, sigma);

  const int tiles = keys.tiles();
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    int ahead = keys.fetch_pages(t + STAGES);
    cp_async_wait<STAGES - 2>();
    warp_sync();  // tile t is here for the warp, and tile t − 1 is used up
    keys.start_loading(ring[(t + STAGES - 1) % STAGES], t + STAGES - 1, pages);
    cp_async_commit();
    pages = ahead;

    const Stage& tile = ring[t % STAGES];
    Accumulator<MMA_M, KEYS> r_s;
    r_s.clear();
    multiply_abt<Element>(r_s, s.q, 0, tile.k);
    if constexpr (SOFTCAP) cap_scores(r_s, squash);
    rows.mask(r_s, keys.key0(t), keys.end, QuerySight{M, length, left, right});
    softmax.update(r_s, r_o, sigma2);
    multiply_ab<Element>(r_o, r_s, tile.v);
  }

  softmax.finish();
  cp_async_wait<0>();
  block_sync();  // every warp has left its ring
  store_state(s.state[warp_id()], r_o, softmax);
  block_sync();

  for (int i = threadIdx.x; i < rows.count * (HEAD_DIM / 2); i += THREADS) {
    const int row = i / (HEAD_DIM / 2), col = i % (HEAD_DIM / 2) * 2;
    SoftmaxRow whole;
    Pair o{0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      Pair part = load_shared(reinterpret_cast<const Pair*>(&s.state[w].o[row][col]));
      auto factor = whole.merge({load_shared(&s.state[w].m[row]), load_shared(&s.state[w].l[row])}, sigma2);
      o.a = o.a * factor.mine + part.a * factor.theirs;
      o.b = o.b * factor.mine + part.b * factor.theirs;
    }
    const float inverse = whole.inverse_sum();
    store_pair(rows.o_at(g_o, b, row, split) + col, o.a * inverse, o.b * inverse);
    if (col == 0) store_global(rows.lse_at(g_lse, b, row, split), whole.lse(sigma));
  }
}

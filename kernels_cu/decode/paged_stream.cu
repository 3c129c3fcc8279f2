// paged_stream: decode attention over a paged KV cache in equal shares (Stream-K, Osama et al. 2023; as in
// paged.cu, the query heads of one KV head are the rows of one tensor-core tile).
//
// The keys of the batch are one list of rounds: sequence after sequence, each cut into rounds of WARPS tiles.
// Groups of blocks take equal shares of it, whatever the lengths, which they read on the device: so one launch,
// and a captured graph follows them as they grow. In a group each block has one KV head. A sequence that lies in
// one share is finished there; of one that several shares cut, each block leaves its part, and the last to do so
// merges them in their order.
//
//   share of group g = rounds [⌊g R / G⌋, ⌊(g + 1) R / G⌋)     of R rounds over G groups
//
// grid    (HKV · ceil(GROUP / 16), groups), as many as are resident at once. NOTE: the blocks of a group run side
//         by side, so that the heads of a token, neighbours in memory, are read at the same time
// block   WARPS warps; in a round each takes its own tile of KEYS keys, from its own ring of STAGES tiles, which
//         runs on from sequence to sequence; no block barrier in the loop. Where one ends the warps' states merge
// smem    of each warp the ring, and in the same copies Q; its O takes the place of the tile it has used last
// bytes   every key's K and V row once a KV head (once for each 16 query heads of a group), its page number and,
//         of a quantised cache whose pages have scales, those; Q once a warp for each stretch of a sequence; O
//         and LSE; of a sequence that is cut, every part written and read
#include "decode/products.cuh"
#include "prim/mask.cuh"
#include "prim/paging.cuh"
#include "prim/scan.cuh"
#include "prim/softmax.cuh"
#include "prim/swizzled.cuh"
#include "prim/ticket.cuh"
#include "prim/tile.cuh"

constexpr int D_PAD = round_up(HEAD_DIM, MMA_K), THREADS = WARPS * WARP, ROUND = WARPS * KEYS,
              ROW_TILES = ceil_div(GROUP, MMA_M), ROWS = GROUP < MMA_M ? GROUP : MMA_M;
using Products = ProductsOf<Stored, SCALES, IsByte<Stored>::value>::type;
constexpr int PER_WORD = 2 / sizeof(Cell<Stored>), WORDS = D_PAD / PER_WORD;  // 16 bits, and of a row of K or V
constexpr int MOST_PARTS = 64;  // of a sequence, in the mean: merging more takes longer than shorter shares save
static_assert(KEYS % MMA_K == 0 && KEYS <= WARP, "a lane looks up the page of a key");

struct Tile : KeyScales<KEYS, SCALES == SCALES_PAGES> {
  SwizzledTile<Element, KEYS, WORDS> k, v;
};
/// The rows of Q that there are; those that the tensor core takes beyond are the last one again.
struct QueryTile {
  static constexpr int COLS = D_PAD;
  SwizzledTile<Element, ROWS, D_PAD> rows;

  METHOD const Element* at(int row, int col) const { return rows.at(min(row, ROWS - 1), col); }
};
union Stage {
  Tile tile;
  float o[ROWS][D_PAD];
};
struct Smem {
  QueryTile q[WARPS][STAGES];
  Stage ring[WARPS][STAGES];
  float m[WARPS][MMA_M], l[WARPS][MMA_M], lse[MMA_M];
  alignas(16) int last;  // whether this block merges the parts
};
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// Rounds of so many keys. NOTE: without keys there is one all the same, which leaves 0 and −∞.
DEVICE int rounds_of(int length) { return max(ceil_div(length, ROUND), 1); }

/// A round: of which sequence, and which of its own.
struct Place {
  int b, round, length;

  METHOD int rounds() const { return rounds_of(length); }
};

/// The list of rounds, and the groups' shares of it.
struct Rounds {
  const int* g_lengths;
  int batch, total, groups;

  METHOD Rounds(const int* g_lengths, int batch) : g_lengths(g_lengths), batch(batch) {
    int mine = 0;
#pragma unroll 4
    for (int b = lane_id(); b < batch; b += WARP) mine += rounds_of(load_global(g_lengths + b));
    total = warp_sum(mine);
    groups = min(min(int(gridDim.y), total), MOST_PARTS * batch);
  }
  /// Where a group's share begins. NOTE: the plan sees to it that these products fit 32 bits.
  METHOD int share(int group) const { return group * total / groups; }
  /// The group in whose share a round is.
  METHOD int group_of(int round) const { return ((round + 1) * groups - 1) / total; }

  /// Where a round of the list is.
  METHOD Place find(int round) const {
    int before = 0;
#pragma unroll 1
    for (int first = 0;; first += WARP) {
      const int b = first + lane_id(), length = b < batch ? load_global(g_lengths + b) : 0;
      const int mine = b < batch ? rounds_of(length) : 0, upto = before + warp_prefix(mine);
      const int lane = warp_sum(upto <= round);  // so many sequences of these end before it
      if (lane < WARP) return {first + lane, round - shuffle(upto - mine, lane), shuffle(length, lane)};
      before = shuffle(upto, WARP - 1);
    }
  }
  METHOD void skip(Place& at, int count) const {
    at.round += count;
    if (at.round < at.rounds()) return;
    at.round = 0;
    at.length = ++at.b < batch ? load_global(g_lengths + at.b) : 0;
  }
};

DEVICE int key0_of(int round) { return round * ROUND + warp_id() * KEYS; }

/// A warp's copies, which run ahead of its products from sequence to sequence.
struct Loader {
  const View<const Element, 4>& g_q;
  const View<const Cell<Stored>, 4>&g_k, &g_v;
  const View<const int, 2>& g_table;
  const Scales& scales;
  const Rounds& list;
  int h0, rows, hkv;
  Place at;
  int left;     // rounds of the share not yet begun
  int pages;    // in lane i the page of the next tile's key i
  int stretch;  // that the next tile belongs to, the first one 0
  bool first;   // whether it is that stretch's first

  METHOD Loader(const View<const Element, 4>& g_q, const View<const Cell<Stored>, 4>& g_k,
                const View<const Cell<Stored>, 4>& g_v, const View<const int, 2>& g_table, const Scales& scales,
                const Rounds& list, int h0, int rows, int hkv, Place at, int left)
      : g_q(g_q), g_k(g_k), g_v(g_v), g_table(g_table), scales(scales), list(list), h0(h0), rows(rows),
        hkv(hkv), at(at), left(left), pages(fetch_pages()), stretch(0), first(true) {}
  METHOD int fetch_pages() const {
    const int key = key0_of(at.round) + lane_id();
    return lane_id() < KEYS && key < at.length ? page_of<PAGE_SIZE>(g_table.at(at.b), key) : 0;
  }
  /// Starts the next tile, before a stretch's first one its Q, and looks up the pages of the tile behind, so
  /// that no copy waits for them.
  METHOD void start_loading(QueryTile (&q)[STAGES], Tile& s) {
    if (left-- <= 0) return;
    const Place now = at;
    const int key0 = key0_of(now.round), mine = key0 + lane_id();
    // Each lane places the row of its own key, and tells the lanes that copy it.
    const int64_t k_row = int64_t(row_in_page<PAGE_SIZE>(g_k, pages, mine, hkv)),
                  v_row = int64_t(row_in_page<PAGE_SIZE>(g_v, pages, mine, hkv));
    s.start_loading(scales, int64_t(pages) * (gridDim.x / ROW_TILES) + hkv, mine < now.length);
    if (first)
      load_tile_async<WARP>(q[stretch % STAGES].rows, g_q.at(now.b, 0, h0), g_q.stride[2], rows, HEAD_DIM,
                            lane_id());
    if (left > 0) {
      list.skip(at, 1);
      first = at.b != now.b, stretch += first;
      pages = fetch_pages();
    }
    using W = Walk<WARP, WORDS>;
    const W walk(lane_id());
#pragma unroll
    for (int i = 0; i < ceil_div(KEYS, W::ROW_STEP); ++i) {
      const int row = walk.row + i * W::ROW_STEP;
      const Element *k = reinterpret_cast<const Element*>(shuffle(k_row, row % WARP)),
                    *v = reinterpret_cast<const Element*>(shuffle(v_row, row % WARP));
      if (walk.rests() || row >= KEYS) continue;
      const bool valid = key0 + row < now.length && walk.col < HEAD_DIM / PER_WORD;
      cp_async16(s.k.at(row, walk.col), k + walk.col, valid);
      cp_async16(s.v.at(row, walk.col), v + walk.col, valid);
    }
  }
};

struct alignas(16) Quad {
  float x[4];
};

/// Merges the warps' states: each brings its O to the weight that its keys have among all, and leaves it where
/// `s.ring[warp][used]` was; s.lse is the rows' LSE.
DEVICE void merge_warps(Smem& s, int used, Accumulator<MMA_M, D_PAD>& r_o, Softmax<MMA_M>& softmax,
                        float sigma, float o_scale) {
  const float sigma2 = sigma * LOG2_E;
  constexpr int HALVES = ROWS > 8 ? 2 : 1;  // of the tile's 16 rows
  softmax.finish();
#pragma unroll
  for (int half = 0; half < HALVES; ++half)
    if (lane_id() % 4 == 0) {
      store_shared(&s.m[warp_id()][r_o.row(0, half)], softmax.row[0][half].m);
      store_shared(&s.l[warp_id()][r_o.row(0, half)], softmax.row[0][half].l);
    }
  block_sync();
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int row = r_o.row(0, half);
    if (row >= ROWS) continue;
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, load_shared(&s.m[w][row]));
    SoftmaxRow whole(top, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
      whole.l += load_shared(&s.l[w][row]) * whole.weight(load_shared(&s.m[w][row]), sigma2);
    const float factor = whole.weight(softmax.row[0][half].m, sigma2) * whole.inverse_sum() * o_scale;
    if (warp_id() == 0 && lane_id() % 4 == 0) store_shared(&s.lse[row], whole.lse(sigma));
    Products::store(s.ring[warp_id()][used].o[row], r_o, half, factor);
  }
  block_sync();
}

/// Calls f(row, column) for each four neighbours of `rows` rows, by the block's threads.
template <class F> DEVICE void for_quads(int rows, F f) {
  for (int i = threadIdx.x; i < rows * (HEAD_DIM / 4); i += THREADS)
    f(i / (HEAD_DIM / 4), i % (HEAD_DIM / 4) * 4);
}

/// Writes four neighbours of a row, of whichever type.
template <class T> DEVICE void store_quad(T* p, const Quad& q) {
  store_pair(p, q.x[0], q.x[1]), store_pair(p + 2, q.x[2], q.x[3]);
}
template <> METHOD void store_quad<float>(float* p, const Quad& q) {
  store_global(reinterpret_cast<Quad*>(p), q);
}

/// The parts of one sequence and head, in the order of its keys: of the groups from `first` to `last`, where a
/// block has two places, one for the rest of a sequence and one for the start of another.
struct Parts {
  const View<float, 3>& g_o;
  const View<float, 2>& g_lse;
  int unit, units, first, last;

  METHOD int place(int group, bool start) const { return 2 * (group * units + unit) + start; }
  METHOD int place(int group) const { return place(group, group == first); }

  /// O of four columns of a row, and its LSE. NOTE: 16 parts are on their way at a time, there or not.
  METHOD Quad merged(int row, int col, float& lse) const {
    constexpr int PARTS = 16;
    SoftmaxRow whole;
    Quad o{};
#pragma unroll 1
    for (int group = first; group <= last; group += PARTS) {
      Quad part[PARTS];
      float part_lse[PARTS];
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        const int p = place(group + i);
        const bool there = group + i <= last;
        part[i] = there ? load_global(reinterpret_cast<const Quad*>(g_o.at(p, row) + col)) : Quad{};
        part_lse[i] = there ? load_global(g_lse.at(p) + row) : -INFINITY;
      }
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < PARTS; ++i) top = fmaxf(top, part_lse[i]);
      const float rescale = whole.raise(top, LOG2_E);
#pragma unroll
      for (int e = 0; e < 4; ++e) o.x[e] *= rescale;
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        const float weight = whole.weight(part_lse[i], LOG2_E);
        whole.l += weight;
#pragma unroll
        for (int e = 0; e < 4; ++e) o.x[e] += part[i].x[e] * weight;
      }
    }
    const float inverse = whole.inverse_sum();
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] *= inverse;
    lse = whole.lse(1.f);
    return o;
  }
};

KERNEL(THREADS, BLOCKS_PER_SM)
paged_stream(const View<const Element, 4> g_q, const View<const Cell<Stored>, 4> g_k,
             const View<const Cell<Stored>, 4> g_v, const View<const int, 2> g_table, const int* g_lengths,
             const View<Element, 4> g_o, const View<float, 3> g_lse, const View<float, 3> g_part,
             const View<float, 2> g_part_lse, int* g_tickets, float sigma, int BATCH, const float* g_k_scale,
             const float* g_v_scale, float k_scale, float v_scale) {
  Smem& s = dynamic_smem<Smem>();
  const Scales scales{g_k_scale, g_v_scale, k_scale, v_scale};
  const int unit = blockIdx.x, group = blockIdx.y, hkv = unit / ROW_TILES, row_tile = unit % ROW_TILES;
  const int h0 = hkv * GROUP + row_tile * MMA_M, rows = min(GROUP - row_tile * MMA_M, MMA_M);
  const Rounds list(g_lengths, BATCH);
  if (group >= list.groups) return;
  int now = list.share(group);
  const int end = list.share(group + 1);
  Place at = list.find(now);
  Loader loader(g_q, g_k, g_v, g_table, scales, list, h0, rows, hkv, at, end - now);
  Products products(scales, hkv);
  auto& q = s.q[warp_id()];
  auto& ring = s.ring[warp_id()];

  const float sigma2 = sigma * LOG2_E;
  int t = 0;
#pragma unroll 1
  for (int stretch = 0; now < end; ++stretch) {  // of one sequence
    const int count = min(at.rounds() - at.round, end - now), ahead = stretch == 0 ? STAGES - 1 : 0;
    Accumulator<MMA_M, D_PAD> r_o;
    Softmax<MMA_M> softmax;
    r_o.clear();
#pragma unroll 1
    for (int i = -ahead; i < count; ++i) {
      if (i >= 0) {
        cp_async_wait<STAGES - 2>();
        warp_sync();  // the tile is here for the warp, and the one before is used up
      }
      loader.start_loading(q, ring[(t + min(i, 0) + STAGES - 1) % STAGES].tile);
      cp_async_commit();
      if (i < 0) continue;

      const Tile& tile = ring[t++ % STAGES].tile;
      const int key0 = key0_of(at.round + i);
      Accumulator<MMA_M, KEYS> r_s;
      r_s.clear();
      if (i == 0) products.take(q[stretch % STAGES]);
      products.scores(r_s, q[stretch % STAGES], tile);
      if (key0 + KEYS > at.length) mask_scores(r_s, false, 0, key0, 0, at.length);
      products.weigh(softmax, r_s, r_o, sigma2);
      products.output(r_o, r_s, tile);
    }
    const int used = (t + STAGES - 1) % STAGES;  // nothing is on its way to this tile yet
    merge_warps(s, used, r_o, softmax, sigma, products.o_scale());

    const bool whole = count == at.rounds();
    const int first = now - at.round;  // the sequence's first round in the list
    const Parts parts{g_part, g_part_lse, unit, int(gridDim.x), list.group_of(first),
                      list.group_of(first + at.rounds() - 1)};
    const int mine = parts.place(group, at.round == 0);
    for_quads(rows, [&](int row, int col) {
      Quad o{};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const Quad part = load_shared(reinterpret_cast<const Quad*>(&s.ring[w][used].o[row][col]));
#pragma unroll
        for (int e = 0; e < 4; ++e) o.x[e] += part.x[e];
      }
      if (whole)
        store_quad(g_o.at(at.b, 0, h0 + row) + col, o);
      else
        store_quad(g_part.at(mine, row) + col, o);
      if (col == 0)
        store_global(whole ? g_lse.at(at.b, h0 + row) : g_part_lse.at(mine) + row, load_shared(&s.lse[row]));
    });
    if (!whole) device_fence();
    block_sync();

    if (!whole) {
      if (threadIdx.x == 0) {
        const bool last = take_ticket(g_tickets + at.b * gridDim.x + unit, parts.last - parts.first + 1);
        store_shared(&s.last, int(last));
      }
      block_sync();
      if (load_shared(&s.last)) {
        device_fence();
        for_quads(rows, [&](int row, int col) {
          float lse;
          store_quad(g_o.at(at.b, 0, h0 + row) + col, parts.merged(row, col, lse));
          if (col == 0) store_global(g_lse.at(at.b, h0 + row), lse);
        });
      }
    }
    now += count;
    if (now < end) list.skip(at, count);
  }
}

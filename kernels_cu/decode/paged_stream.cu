// paged_stream: decode attention over a paged KV cache in equal shares (Stream-K, Osama et al. 2023; as in
// paged.cu, the queries and heads that share a KV head are the rows of a tensor-core tile).
//
// The keys of the batch that queries see are one list of rounds: sequence after sequence, each cut into rounds
// of WARPS tiles. Groups of blocks take equal shares of it (shares.cuh), whatever the lengths, which they read on
// the device: so one launch, and a captured graph follows them as they grow. In a group each block has one KV
// head. A sequence that lies in one share is finished there; of one that several shares cut, each block leaves
// its part, and the last to do so merges them in their order. A sink is in the part that has the first keys.
//
// Where they are compiled in, as in flash.cu: CAUSAL among the last M tokens, WINDOW, SOFTCAP, SINKS
//
// grid    (HKV · ceil(M · GROUP / (16 TEAM)), groups), as many as are resident at once. NOTE: the blocks of a group
//         run side by side, so that the heads of a token, neighbours in memory, are read at the same time
// block   WARPS warps; in a round each copies its own tile of KEYS keys to its own ring of STAGES tiles, which runs
//         on from sequence to sequence. TEAM warps are a team: each has its own 16 rows, and multiplies them with
//         the tiles of all its team; no wider barrier in the loop. Where a sequence ends the states of warps with
//         the same rows merge; of one that is cut, each warp merges those rows whose parts it has left itself
// smem    of each warp the ring, and in the same copies Q; its O takes the place of the tile it has used last
// bytes   the K and V row of every listed key once a KV head (once for each 16 · TEAM rows of Q), its page number
//         and, of a quantised cache whose pages have scales, those; a warp's rows of Q for each stretch of a
//         sequence; O and LSE; of a sequence that is cut, every part written and read
#include "decode/products.cuh"
#include "decode/rows.cuh"
#include "decode/shares.cuh"
#include "prim/paging.cuh"
#include "prim/softcap.cuh"
#include "prim/softmax.cuh"
#include "prim/swizzled.cuh"
#include "prim/ticket.cuh"

constexpr int D_PAD = round_up(HEAD_DIM, MMA_K), THREADS = WARPS * WARP, ROUND = WARPS * KEYS;
constexpr int ROWS = M * GROUP < MMA_M ? M * GROUP : MMA_M;  // of a warp
constexpr int UNITS = ceil_div(ROW_TILES, TEAM);             // of a KV head
// NOTE: wider rows of O leave no registers for products with more keys, nor for several rows at once in a merge.
constexpr bool WIDE = D_PAD > 128;
constexpr int PAIR = TEAM > 1 && KEYS == MMA_K && !WIDE && !IsByte<Stored>::value ? 2 : 1;  // warps whose tiles are one
using Products = ProductsOf<Stored, SCALES, IsByte<Stored>::value>::type;
constexpr int PER_WORD = 2 / sizeof(Cell<Stored>), WORDS = D_PAD / PER_WORD;  // 16 bits, and of a row of K or V
constexpr int BEHIND = 2 * (STAGES - 2);  // groups of copies, K and V of a tile each one, behind the tile waited for
constexpr bool V_LATER = TEAM == 1;  // V is waited for after S. NOTE: of a team that barrier costs more than it saves
constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int RUN = WINDOW ? 1 : common_divisor(PAGE_SIZE, KEYS);  // keys that lie in one page, from a tile's first on
constexpr int MOST_PARTS = 64;  // of a sequence, in the mean: merging more takes longer than shorter shares save
static_assert(WARPS % TEAM == 0, "all teams are whole");
static_assert(O_PITCH >= D_PAD && O_PITCH % 4 == 0, "O is read four columns at a time");
static_assert(KEYS % MMA_K == 0 && KEYS <= WARP, "a lane looks up the page of a key");

struct Tile : KeyScales<KEYS, SCALES == SCALES_PAGES> {
  SwizzledTile<Element, PAIR * KEYS, WORDS> k, v;
};
/// The rows of Q that there are; those that the tensor core takes beyond are the last one again.
struct QueryTile {
  static constexpr int COLS = D_PAD;
  SwizzledTile<Element, ROWS, D_PAD> rows;

  METHOD const Element* at(int row, int col) const { return rows.at(min(row, ROWS - 1), col); }
};
union Stage {
  Tile tile;
  float o[PAIR][ROWS][O_PITCH];  // rows that are stored together begin in different banks, if there is room

  METHOD Quad* room() { return reinterpret_cast<Quad*>(this) + warp_id() % PAIR * int(sizeof(Stage) / PAIR / 16); }
};
constexpr int ROOM = room_in(sizeof(Stage) / PAIR);  // of a warp, for parts of a sequence that is cut
constexpr int OWN = ceil_div(M * GROUP < TEAM * MMA_M ? M * GROUP : TEAM * MMA_M, WARPS);  // rows that a warp merges
constexpr int AT_ONCE = WIDE ? 1 : OWN < 4 && OWN < ROOM ? OWN : ROOM < 4 ? ROOM : 4;
struct Smem {
  QueryTile q[WARPS][STAGES];
  Stage ring[WARPS / PAIR][STAGES];
  float m[WARPS][MMA_M], l[WARPS][MMA_M];
};
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// Of a sequence, the first key that some query sees.
struct FirstSeen {
  int left;  // of the window

  METHOD int operator()(int length) const { return first_seen(length, left); }
};
using Rounds = Shares<ROUND, MOST_PARTS, FirstSeen>;
using Round = Rounds::At;

/// The first key of a warp's tile in a round, or in the one that is so many behind.
DEVICE int key0_of(int warp, const Round& at, int ahead = 0) { return at.first_key() + ahead * ROUND + warp * KEYS; }

/// Of this warp's team.
DEVICE int first_warp() { return warp_id() / TEAM * TEAM; }
DEVICE void team_sync(SITE_ONLY) {
  if constexpr (TEAM == 1)
    warp_sync(ONLY_AT_SITE);
  else
    named_sync(1 + warp_id() / TEAM, TEAM * WARP AT_SITE);
}

/// All rows of the teams of a unit. NOTE: behind the last one a warp of its own has less than none.
DEVICE Rows rows_of_team(int unit) {
  Rows rows(unit / UNITS, unit % UNITS * TEAM);
  rows.count = min(M * GROUP - rows.first, TEAM * MMA_M);
  return rows;
}

/// A warp's copies, which run ahead of its products from sequence to sequence.
struct Loader {
  const View<const Element, 4>& g_q;
  const View<const Cell<Stored>, 4>&g_k, &g_v;
  const View<const int, 2>& g_table;
  const Scales& scales;
  const Rounds& list;
  const Rows& rows;
  Round at;
  int left;     // rounds of the share not yet begun
  int pages;    // in lane i the page of the next tile's key i
  int stretch;  // that the next tile belongs to, the first one 0
  bool first;   // whether it is that stretch's first

  METHOD Loader(const View<const Element, 4>& g_q, const View<const Cell<Stored>, 4>& g_k,
                const View<const Cell<Stored>, 4>& g_v, const View<const int, 2>& g_table, const Scales& scales,
                const Rounds& list, const Rows& rows, Round at, int left)
      : g_q(g_q), g_k(g_k), g_v(g_v), g_table(g_table), scales(scales), list(list), rows(rows), at(at), left(left),
        pages(fetch_pages()), stretch(0), first(true) {}
  METHOD int fetch_pages() const {
    const int key = key0_of(warp_id(), at) + lane_id();
    return lane_id() < KEYS && key < at.length ? page_of<PAGE_SIZE>(g_table.at(at.b), key) : 0;
  }
  /// Starts the next tile, if there is one: K, with a stretch's first one Q, as a group of copies, V as another. Looks
  /// up the pages of the tile behind, so that no copy waits for them.
  METHOD void start_loading(QueryTile (&q)[STAGES], Tile& s) {
    if (left-- > 0) start_next(q, s);
    else cp_async_commit();
    cp_async_commit();
  }
  METHOD void start_next(QueryTile (&q)[STAGES], Tile& s) {
    using W = Walk<WARP, WORDS>;
    const W walk(lane_id());
    const int key0 = key0_of(warp_id(), at), here = at.length - key0;
    // A lane places the row of its own key, and tells the lanes that copy it, who find those behind it in the page.
    const auto copy = [&](auto& tile, const View<const Cell<Stored>, 4>& cache) {
      const auto mine = int64_t(row_in_page<PAGE_SIZE>(cache, pages, key0 + lane_id(), rows.hkv));
      const Cell<Stored>* from;
#pragma unroll
      for (int i = 0; i < ceil_div(KEYS, W::ROW_STEP); ++i) {
        const int row = walk.row + i * W::ROW_STEP;
        if (RUN % W::ROW_STEP != 0 || i * W::ROW_STEP % RUN == 0)
          from = reinterpret_cast<const Cell<Stored>*>(shuffle(mine, row % WARP)) + walk.col * PER_WORD;
        else
          from += W::ROW_STEP * cache.stride[1];
        if (walk.rests() || row >= KEYS) continue;
        const bool valid = row < here && walk.col < HEAD_DIM / PER_WORD;
        cp_async16(tile.at(warp_id() % PAIR * KEYS + row, walk.col), from, valid);
      }
    };
    s.start_loading(scales, int64_t(pages) * (gridDim.x / UNITS) + rows.hkv, lane_id() < here);
    copy(s.k, g_k);
    if (first) rows.load_q<WARP>(q[stretch % STAGES].rows, g_q, at.b, lane_id());
    cp_async_commit();
    copy(s.v, g_v);
    if (left > 0) look_ahead();
  }
  /// NOTE: behind the copies, which have used `pages` by then: a register that two loads of them share has to be
  /// moved, and who moves it waits for the page.
  METHOD void look_ahead() {
    const int b = at.b;
    list.skip(at, 1);
    first = at.b != b, stretch += first;
    pages = fetch_pages();
  }
};

/// A warp's states and O, the latter where its tile `used` was, which is free now.
DEVICE void leave(Smem& s, int used, const Accumulator<MMA_M, D_PAD>& r_o, Softmax<MMA_M>& softmax, float o_scale) {
  constexpr int HALVES = ROWS > 8 ? 2 : 1;  // of the tile's 16 rows
  softmax.finish();
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int row = r_o.row(0, half);
    if (row >= ROWS) continue;
    if (lane_id() % 4 == 0) {
      store_shared(&s.m[warp_id()][row], softmax.row[0][half].m);
      store_shared(&s.l[warp_id()][row], softmax.row[0][half].l);
    }
    Products::store(s.ring[warp_id() / PAIR][used].o[warp_id() % PAIR][row], r_o, half, o_scale);
  }
}

DEVICE bool has_column(int col) { return HEAD_DIM % (WARP * 4) == 0 || col < HEAD_DIM; }

/// O, but not yet divided, of four columns of one of the block's rows, and its state, of what the warps that have
/// it have left.
DEVICE Quad merged(const Smem& s, int used, int row, int col, float sigma, SoftmaxRow& whole) {
  const int first = TEAM == 1 ? 0 : row / MMA_M;
  row -= first * MMA_M;
  float top = -INFINITY;
#pragma unroll
  for (int w = 0; w < WARPS; w += TEAM) top = fmaxf(top, load_shared(&s.m[first + w][row]));
  whole = SoftmaxRow(top, 0.f);
  Quad o{};
#pragma unroll
  for (int w = 0; w < WARPS; w += TEAM) {
    const float weight = whole.weight(load_shared(&s.m[first + w][row]), sigma * LOG2_E);
    whole.l += load_shared(&s.l[first + w][row]) * weight;
    const float* s_o = &s.ring[(first + w) / PAIR][used].o[(first + w) % PAIR][row][col];
    if (has_column(col)) o.add(load_shared(reinterpret_cast<const Quad*>(s_o)), weight);
  }
  return o;
}

/// Merges those of `rows` rows that are the warp's: `sum(o, lse, row, count, col)` makes four columns a lane of `count`
/// rows, WARPS apart, and `put(row, col, o, lse)` takes each of those that there are.
template <class Sum, class Put> DEVICE void merge_rows(int rows, Sum sum, Put put) {
#pragma unroll 1
  for (int row = warp_id(); row < rows; row += AT_ONCE * WARPS)
#pragma unroll 1
    for (int col0 = 0; col0 < HEAD_DIM; col0 += WARP * 4) {
      const int col = col0 + lane_id() * 4, count = AT_ONCE == 1 ? 1 : min(ceil_div(rows - row, WARPS), AT_ONCE);
      Quad o[AT_ONCE];
      float lse[AT_ONCE];
      sum(o, lse, row, count, col);
      if (!has_column(col)) continue;
#pragma unroll
      for (int r = 0; r < AT_ONCE && r < count; ++r) put(row + r * WARPS, col, o[r], lse[r]);
    }
}

KERNEL(THREADS, BLOCKS_PER_SM)
paged_stream(const View<const Element, 4> g_q, const View<const Cell<Stored>, 4> g_k,
             const View<const Cell<Stored>, 4> g_v, const View<const int, 2> g_table, const int* g_lengths,
             const View<Element, 4> g_o, const View<float, 3> g_lse, const View<float, 3> g_part,
             const View<float, 2> g_part_lse, int* g_tickets, float sigma, int BATCH, const float* g_k_scale,
             const float* g_v_scale, float k_scale, float v_scale, int left, int right, float squash,
             const float* g_sinks) {
  Smem& s = dynamic_smem<Smem>();
  const Scales scales{g_k_scale, g_v_scale, k_scale, v_scale};
  const int unit = blockIdx.x, group = blockIdx.y;
  const Rows rows = rows_of_team(unit), own(rows.hkv, rows.first / MMA_M + warp_id() % TEAM);
  const Rounds list(g_lengths, BATCH, gridDim.y, 1, FirstSeen{left});
  if (!list.has_share(group)) return;
  int now = list.begin(group);
  const int end = list.begin(group + 1);
  Round at = list.find(now);
  Loader loader(g_q, g_k, g_v, g_table, scales, list, own, at, end - now);
  Products products(scales, rows.hkv);
  auto& q = s.q[warp_id()];
  auto& ring = s.ring[warp_id() / PAIR];

  const float sigma2 = sigma * LOG2_E;
  int t = 0;
#pragma unroll 1
  for (int stretch = 0; now < end; ++stretch) {  // of one sequence
    const int count = min(at.tiles() - at.tile, end - now), ahead = stretch == 0 ? STAGES - 1 : 0;
    const int begin = now - at.tile;  // the sequence's first round in the list
    const int first = list.group_of(begin), last = list.group_of(begin + at.tiles() - 1);
    const Parts parts = parts_of_groups(g_part, g_part_lse, unit, gridDim.x, first, last);
    const bool whole = count == at.tiles();
    const int mine = parts.place(group - first);
    Accumulator<MMA_M, D_PAD> r_o;
    Softmax<MMA_M> softmax;
    r_o.clear();
    if (SINKS && at.tile == 0 && warp_id() < TEAM) own.begin_with_sinks(softmax, g_sinks, sigma);
#pragma unroll 1
    for (int i = -ahead; i < count; ++i) {
      if (i >= 0) {
        cp_async_wait<BEHIND + V_LATER>();
        team_sync();  // the team's tiles are here, and the ones before are used up
      }
      loader.start_loading(q, ring[(t + min(i, 0) + STAGES - 1) % STAGES].tile);
      if (i < 0) continue;

      const int slot = t++ % STAGES;
      if (UNITS * TEAM > ROW_TILES && own.count <= 0) continue;
      if (i == 0) products.take(q[stretch % STAGES]);
#pragma unroll 1
      for (int mate = 0; mate < TEAM; mate += PAIR) {
        const int warp = first_warp() + mate;
        const Tile& tile = s.ring[warp / PAIR][slot].tile;
        Accumulator<MMA_M, PAIR * KEYS> r_s;
        r_s.clear();
        products.scores(r_s, q[stretch % STAGES], tile);
        if constexpr (SOFTCAP) cap_scores(r_s, squash);
        own.mask(r_s, key0_of(warp, at, i), at.length, QuerySight{M, at.length, left, right});
        products.weigh(softmax, r_s, r_o, sigma2);
        if constexpr (V_LATER) {
          cp_async_wait<BEHIND + 2>();  // the next tile is on its way by now
          warp_sync();
        }
        products.output(r_o, r_s, tile);
      }
    }
    const int used = (t + STAGES - 1) % STAGES;  // nothing is on its way to this tile yet
    team_sync();  // all have read it
    leave(s, used, r_o, softmax, products.o_scale());
    block_sync();
    const auto finish = [&](int row, int col, const Quad& o, float lse) {
      store_quad(rows.o_at(g_o, at.b, row) + col, o);
      if (col == 0) store_global(rows.lse_at(g_lse, at.b, row), lse);
    };
    const auto leave_part = [&](int row, int col, const Quad& o, float lse) {
      store_quad(g_part.at(mine, row) + col, o);
      if (col == 0) store_global(g_part_lse.at(mine) + row, lse);
    };
    const auto of_warps = [&](Quad(&o)[AT_ONCE], float(&lse)[AT_ONCE], int row, int count, int col) {
#pragma unroll
      for (int r = 0; r < AT_ONCE; ++r) {
        SoftmaxRow state;
        o[r] = merged(s, used, r < count ? row + r * WARPS : row, col, sigma, state);
        o[r].scale(state.inverse_sum()), lse[r] = state.lse(sigma);
      }
    };
    const auto of_parts = [&](Quad(&o)[AT_ONCE], float(&lse)[AT_ONCE], int row, int count, int col) {
      parts.merge<ROOM>(o, lse, ring[used].room(), row, WARPS, count, col, has_column(col));
    };
    merge_rows(rows.count, of_warps, [&](int row, int col, const Quad& o, float lse) {
      if (whole)
        finish(row, col, o, lse);
      else
        leave_part(row, col, o, lse);
    });
    block_sync();  // all have left what the warps left
    if (!whole && warp_id() < rows.count) {
      int* ticket = g_tickets + (at.b * gridDim.x + unit) * WARPS + warp_id();
      const int comes_last = lane_id() == 0 && take_ticket(ticket, parts.count);
      if (shuffle(comes_last, 0)) {
        warp_sync();
        merge_rows(rows.count, of_parts, finish);
      }
    }
    now += count;
    if (now < end) list.skip(at, count);
  }
}

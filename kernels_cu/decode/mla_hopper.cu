// mla_hopper: decode of multi-head latent attention as in mla.cu, with what sm_90a has: a block's warpgroups
// copy, score and sum beside each other, and the parts of a sequence are merged by all multiprocessors.
//
//   S = q · [c, r]ᵀ      O = softmax(σ S) c      c: 512 latent numbers a key, r: 64 rotated ones behind them
//
// All query heads share one row a key, and its first 512 numbers are the value: a row is copied once and
// multiplied twice. The keys of the batch are one list of tiles, of which groups of blocks take equal shares
// (shares.cuh); a sequence that several shares cut is left in parts, which a second launch merges.
//
// grid    (ceil(H / ROWS), groups), as many as are resident at once; the blocks of a group run side by side,
//         so that the second one finds the rows in L2. Merging: (blocks a sequence, B), a row of O at a time
// block   four warpgroups. One copies; one computes S and its softmax; two have 256 columns of O each. All
//         multiply 64 rows, of which ROWS are heads
// smem    Q, and a ring of STAGES tiles that runs on from sequence to sequence. P takes the place of a tile's
//         rotated columns, which nobody reads any more. Of a stage three mbarriers: it is full, it is scored,
//         it is empty
// copies  with BOX by one warp and the copy engine, boxes of so many rows of a page; without, row by row and by
//         teams of warps, each a tile of its own
// order   S of a tile beside P V of the one before; its softmax alone
// bytes   every row and its page number once for each ROWS heads; Q once for each stretch of a sequence; O
//         and LSE; of a sequence that is cut, every part written and read
#include "decode/shares.cuh"
#include "prim/acc.cuh"
#include "prim/cp_async.cuh"
#include "prim/mask.cuh"
#include "prim/mbarrier.cuh"
#include "prim/paging.cuh"
#include "prim/stmatrix.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"

constexpr int LATENT = 512, WIDTH = LATENT + 64, PANEL_COLS = 64;
constexpr int THREADS = 4 * WARPGROUP, WARPS_OF_GROUP = WARPGROUP / WARP, COLS = LATENT / 2;
constexpr int COPY_REGISTERS = 48, SCORE_REGISTERS = 144, SUM_REGISTERS = 160;
constexpr int MOST_PARTS = 256;  // of a sequence, in the mean
constexpr int MERGERS = LATENT / 4, ROOM = 16;
static_assert(WGMMA_ROWS % ROWS == 0 && ROWS % 16 == 0, "a product has room for all rows");

using QueryTile = SwizzledTile<Element, ROWS, WIDTH>;
using KeyTile = SwizzledTile<Element, KEYS, WIDTH>;
using WeightTile = SwizzledTile<Element, WGMMA_ROWS, KEYS, 2 * KEYS>;
static_assert(sizeof(WeightTile) == KeyTile::PANEL_BYTES, "P takes a panel's place");

struct Smem {
  union {
    QueryTile q;
    // NOTE: a product reads 64 rows from each panel's first one. Behind ROWS it finds other columns of Q, and
    // behind those of the last panel zeros: rows of S, P and O that nobody stores.
    Element reach[ROWS * (WIDTH - PANEL_COLS) + WGMMA_ROWS * PANEL_COLS];
  };
  KeyTile ring[STAGES];
  float rescale[STAGES][WGMMA_ROWS], inverse[STAGES][WGMMA_ROWS];  // of O, before a tile and after the last
  Mbarrier full[STAGES], scored[STAGES], empty[STAGES];

  METHOD WeightTile& p(int stage) {
    return *reinterpret_cast<WeightTile*>(ring[stage].panel(LATENT / PANEL_COLS));
  }
};
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

using List = Shares<KEYS, MOST_PARTS>;

/// The i-th use of the ring: which stage, and the parity of its phase.
struct Use {
  uint32_t stage, parity;
  METHOD explicit Use(uint32_t i) : stage(i % STAGES), parity(i / STAGES % 2) {}
};

/// Consecutive tiles of one sequence inside a share: `count` of them, from the share's number `t` on.
struct Stretch {
  Place<KEYS> at;
  int t, count;
  bool more;  // of the share follows

  METHOD bool starts() const { return at.tile == 0; }
  METHOD bool ends() const { return at.tile + count == at.tiles(); }
  METHOD bool whole() const { return count == at.tiles(); }
};

/// What a block works on.
struct Share {
  const List& list;
  int group, begin, tiles;

  METHOD Share(const List& list, int group)
      : list(list), group(group), begin(list.begin(group)), tiles(list.begin(group + 1) - begin) {}
  template <class F> METHOD void for_stretches(F f) const {
    Place<KEYS> at = list.find(begin);
#pragma unroll 1
    for (int t = 0; t < tiles;) {
      const int count = min(at.tiles() - at.tile, tiles - t);
      f(Stretch{at, t, count, t + count < tiles});
      t += count;
      if (t < tiles) list.skip(at, count);
    }
  }
};

/// Starts copies of row `row` of a tile, by eight lanes of which each has 16 bytes of every panel.
template <class Tile>
DEVICE void copy_row(Tile& s_tile, int row, const Element* g_row, bool there) {
  Element* s_to = s_tile.at(row, lane_id() % 8 * 8);
  g_row += lane_id() % 8 * 8;
#pragma unroll
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    cp_async16(s_to + panel * Tile::ROWS * PANEL_COLS, g_row + panel * PANEL_COLS, there);
}

// ---- copying

/// Every `step`-th tile of a share, and in each lane the page of one of its keys: of the one `offset` behind
/// its first, if it is there.
struct Walk {
  const Share& share;
  const View<const int, 2>& g_table;
  const int step, offset;
  int t;
  Place<KEYS> at;
  int page = 0;

  METHOD Walk(const Share& share, const View<const int, 2>& g_table, int first, int step, int offset)
      : share(share), g_table(g_table), step(step), offset(offset), t(first), at(share.list.find(share.begin)) {
    move(first);
  }
  METHOD bool over() const { return t >= share.tiles; }
  METHOD int key() const { return at.first_key() + offset; }
  /// Keys of the tile that the sequence has.
  METHOD int keys() const { return min(at.length - at.first_key(), KEYS); }
  METHOD void next() {
    t += step;
    move(step);
  }

 private:
  /// Goes on to tile t, and looks up its pages, so that no copy waits for them.
  METHOD void move(int tiles) {
    if (over()) return;
    for (int i = 0; i < tiles; ++i) share.list.skip(at, 1);
    if (offset < keys()) page = page_of<PAGE_SIZE>(g_table.at(at.b), key());
  }
};

/// Copies row by row, in teams of as many warps as have a lane for each row of a tile.
struct RowCopier {
  using Cache = View<const Element, 4>;
  static constexpr int TEAM = KEYS / WARP, TEAMS = WARPS_OF_GROUP / TEAM, ARRIVALS = KEYS;
  static_assert(KEYS % WARP == 0 && WARPS_OF_GROUP % TEAM == 0, "whole teams");
  static_assert(TEAMS <= STAGES, "a team waits for a stage's next phase: a parity tells two apart");
  const Cache& g_kv;

  METHOD void prepare() const {}
  METHOD void run(Smem& s, const View<const int, 2>& g_table, const Share& share) const {
    const int first_row = warp_in_group() % TEAM * WARP;
    Walk walk(share, g_table, warp_in_group() / TEAM, TEAMS, first_row + lane_id());
#pragma unroll 1
    while (!walk.over()) {
      // Each lane places the row of its own key, and tells the lanes that copy it.
      const int64_t mine = int64_t(row_in_page<PAGE_SIZE>(g_kv, walk.page, walk.key(), 0));
      const int there = walk.keys() - first_row;
      const Use use(walk.t);
      walk.next();
      mbarrier_wait(s.empty[use.stage], use.parity ^ 1);
#pragma unroll 2
      for (int i = 0; i < WARP; i += 4) {
        const int row = i + lane_id() / 8;
        const Element* g_row = reinterpret_cast<const Element*>(shuffle(mine, row));
        copy_row(s.ring[use.stage], first_row + row, g_row, row < there);
      }
      cp_async_commit();
      cp_async_wait<0>();
      fence_proxy_async();
      mbarrier_arrive(s.full[use.stage]);
    }
  }
};

/// Copies boxes of rows by the copy engine: a lane of the first warp has one of each tile, panel by panel.
/// What a tile has behind a sequence's end is then anything.
struct BoxCopier {
  using Cache = TensorMap;
  static constexpr int ARRIVALS = 1, ROWS_OF_BOX = BOX > 0 ? BOX : KEYS;
  static_assert(BOX == 0 || (KEYS % BOX == 0 && KEYS <= BOX * WARP && BOX % 8 == 0), "a lane has a box");
  const Cache& kv;

  METHOD void prepare() const {
    prefetch_map(kv);
    fence_mbarrier_init();
  }
  METHOD void run(Smem& s, const View<const int, 2>& g_table, const Share& share) const {
    if (warp_in_group() != 0) return;
    const int first_row = lane_id() * ROWS_OF_BOX;
    Walk walk(share, g_table, 0, 1, first_row);
#pragma unroll 1
    while (!walk.over()) {
      const int page = walk.page, row = walk.key() % PAGE_SIZE, boxes = ceil_div(walk.keys(), ROWS_OF_BOX);
      const Use use(walk.t);
      walk.next();
      mbarrier_wait(s.empty[use.stage], use.parity ^ 1);
      if (lane_id() == 0)
        mbarrier_arrive_expect_tx(s.full[use.stage], boxes * ROWS_OF_BOX * WIDTH * int(sizeof(Element)));
      if (lane_id() >= boxes) continue;
#pragma unroll
      for (int panel = 0; panel < KeyTile::PANELS; ++panel) {
        const int at[] = {panel * PANEL_COLS, 0, row, page};
        tma_load(s.ring[use.stage].panel(panel) + first_row * PANEL_COLS, kv, at, s.full[use.stage]);
      }
    }
  }
};

template <bool BOXES> struct CopierOf {
  using Type = RowCopier;
};
template <> struct CopierOf<true> {
  using Type = BoxCopier;
};
using Copier = CopierOf<(BOX > 0)>::Type;

// ---- scoring

constexpr int SCORING = 1;  // the named barrier of the warpgroup that scores

struct Scorer {
  Smem& s;
  const View<const Element, 4>& g_q;
  const int h0, rows;
  const float sigma, sigma2;
  WarpgroupAccumulator<WGMMA_ROWS, KEYS> r_s;
  Softmax<MMA_M, true> softmax;

  METHOD Scorer(Smem& s, const View<const Element, 4>& g_q, int h0, int rows, float sigma)
      : s(s), g_q(g_q), h0(h0), rows(rows), sigma(sigma), sigma2(sigma * LOG2_E) {
    for (int i = ROWS * WIDTH + threadIdx.x % WARPGROUP * 8; i < int(sizeof(s.reach) / sizeof(Element));
         i += WARPGROUP * 8)
      store_shared(reinterpret_cast<Vec16*>(s.reach + i), Vec16{});
  }
  METHOD void start_loading_q(int b) {
#pragma unroll 1
    for (int row = warp_in_group() * 4 + lane_id() / 8; row < ROWS; row += WARPS_OF_GROUP * 4)
      copy_row(s.q, row, g_q.at(b, 0, h0 + row), row < rows);
    cp_async_commit();
  }
  METHOD void finish_loading_q() {
    cp_async_wait<0>();
    fence_proxy_async();
    named_sync(SCORING, WARPGROUP);
  }
  /// Starts S of the share's tile t.
  METHOD void start(int t) {
    const Use use(warp_uniform(t));
    mbarrier_wait(s.full[use.stage], use.parity);
    wgmma_fence(r_s);
    wgmma_abt<Element>(r_s, s.q, 0, s.ring[use.stage], false);
    wgmma_commit();
  }
  METHOD void finish() {
    wgmma_wait<0>(r_s);
    named_sync(SCORING, WARPGROUP);  // no warp's product reads the tile's rotated columns any more, nor Q
  }
  METHOD int row(int half) const { return r_s.row(0, half); }

  /// Zeroes a tile's values from row `first` on: what is there may be NaN, which no weight of 0 takes out.
  METHOD void clear_rows(KeyTile& s_tile, int first) const {
    constexpr int CHUNKS = LATENT / 8;
    for (int i = first * CHUNKS + int(threadIdx.x) % WARPGROUP; i < KEYS * CHUNKS; i += WARPGROUP)
      store_shared(reinterpret_cast<Vec16*>(s_tile.at(i / CHUNKS, i % CHUNKS * 8)), Vec16{});
  }
  /// Softmax of a tile: P into its place, and by what O is to be rescaled before it is added.
  METHOD void weigh(int stage) {
    WarpgroupAccumulator<WGMMA_ROWS, MMA_N> r_factor;  // a column that stands for all of O
    for_pairs(r_factor, [](int, int, float& a, float& b) { a = b = 1.f; });
    softmax.update(r_s, r_factor, sigma2);
    const int p_row = warp_in_group() * MMA_M + lane_id() % MMA_M, p_col = lane_id() / MMA_M * MMA_N;
#pragma unroll
    for (int n = 0; n < r_s.N_TILES; n += 2) {
      const float(&left)[4] = r_s.tile[0][n], (&right)[4] = r_s.tile[0][n + 1];
      const uint32_t r[] = {pack2<Element>(left[0], left[1]), pack2<Element>(left[2], left[3]),
                            pack2<Element>(right[0], right[1]), pack2<Element>(right[2], right[3])};
      stmatrix_x4(s.p(stage).at(p_row, p_col + n * MMA_N), r);
    }
    if (lane_id() % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_shared(&s.rescale[stage][row(half)], r_factor.tile[0][0][2 * half]);
  }
  /// Where a stretch ends: what O is to be multiplied by, and LSE.
  METHOD void leave(int stage, float* g_lse) {
    softmax.finish();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      SoftmaxRow& state = softmax.row[0][half];
      if (lane_id() % 4 == 0) {
        store_shared(&s.inverse[stage][row(half)], state.inverse_sum());
        if (row(half) < rows) store_global(g_lse + row(half), state.lse(sigma));
      }
      state = SoftmaxRow();
    }
  }
  METHOD void publish(int stage) {
    fence_proxy_async();
    mbarrier_arrive(s.scored[stage]);
  }
  METHOD void run(const Stretch& stretch, float* g_lse) {
    const int last = stretch.t + stretch.count - 1, length = stretch.at.length;
    finish_loading_q();
    start(stretch.t);
#pragma unroll 1
    for (int t = stretch.t; t < last; ++t) {
      finish();
      weigh(Use(t).stage);
      publish(Use(t).stage);
      start(t + 1);
    }
    finish();
    if (stretch.more) start_loading_q(stretch.at.b + 1);
    const int stage = Use(last).stage, keys = length - (stretch.at.tile + stretch.count - 1) * KEYS;
    if (keys < KEYS) {
      mask_scores(r_s, false, 0, 0, 0, keys);
      if constexpr (BOX > 0) clear_rows(s.ring[stage], keys);
    }
    weigh(stage);
    leave(stage, g_lse);
    publish(stage);
  }
};

// ---- summing

/// A warpgroup's columns of O. NOTE: in two products. Of one with 128 registers ptxas says that a kernel of
/// 512 threads has too few for it, whatever setmaxnreg says.
struct Output {
  using Half = WarpgroupAccumulator<WGMMA_ROWS, COLS / 2>;
  Half half[2];

  METHOD void clear() { half[0].clear(), half[1].clear(); }
  /// Multiplies each row by its number in shared memory. NOTE: late tiles seldom raise a maximum, so that a
  /// look at all factors pays.
  METHOD void scale_rows(const float* s_factor) {
    const float upper = load_shared(s_factor + Half::row(0, 0));
    const float lower = load_shared(s_factor + Half::row(0, 1));
    if (!warp_any(upper != 1.f || lower != 1.f)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < Half::N_TILES; ++n) {
        half[i].tile[0][n][0] *= upper, half[i].tile[0][n][1] *= upper;
        half[i].tile[0][n][2] *= lower, half[i].tile[0][n][3] *= lower;
      }
  }
  /// Adds P V of a tile, of its columns from `col0` on.
  METHOD void add(const WeightTile& s_p, const KeyTile& s_tile, int col0) {
    wgmma_fence(half[0], half[1]);
#pragma unroll
    for (int k = 0; k < KEYS; k += MMA_K)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        wgmma<Element, Major::K, Major::MN>(half[i].tile[0], s_p.k_major(0, k),
                                            s_tile.mn_major(k, col0 + i * Half::COLS), true);
    wgmma_commit();
    wgmma_wait<0>(half[0], half[1]);
  }
  /// To rows `stride` apart, those below `rows`.
  template <class T> METHOD void store(T* g, int64_t stride, int rows) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = Half::row(0, upper);
      if (row >= rows) continue;
      T* g_row = g + row * stride + Half::col(0, 0);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < Half::N_TILES; ++n)
          store_pair(g_row + i * Half::COLS + n * MMA_N, half[i].tile[0][n][2 * upper],
                     half[i].tile[0][n][2 * upper + 1]);
    }
  }
};

/// O of a stretch, in the columns from `col0` on.
DEVICE void sum(Smem& s, const Stretch& stretch, int col0, Output& r_o) {
  r_o.clear();
#pragma unroll 1
  for (int i = 0; i < stretch.count; ++i) {
    const Use use(warp_uniform(stretch.t + i));
    mbarrier_wait(s.scored[use.stage], use.parity);
    r_o.scale_rows(s.rescale[use.stage]);
    r_o.add(s.p(use.stage), s.ring[use.stage], col0);
    if (i + 1 == stretch.count) r_o.scale_rows(s.inverse[use.stage]);
    mbarrier_arrive(s.empty[use.stage]);
  }
}

KERNEL(THREADS, 1)
mla_hopper(const View<const Element, 4> g_q, const __grid_constant__ Copier::Cache kv,
           const View<const int, 2> g_table, const int* g_lengths, const View<Element, 4> g_o,
           const View<float, 3> g_lse, const View<float, 3> g_part, const View<float, 2> g_part_lse,
           const View<int, 2> g_cuts, float sigma, int BATCH, int HEADS) {
  Smem& s = dynamic_smem<Smem>();
  const int unit = blockIdx.x, h0 = unit * ROWS, rows = min(HEADS - h0, ROWS);
  const Copier copier{kv};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(s.full[stage], Copier::ARRIVALS);
      mbarrier_init(s.scored[stage], WARPGROUP), mbarrier_init(s.empty[stage], 2 * WARPGROUP);
    }
    copier.prepare();
  }
  const List list(g_lengths, BATCH, gridDim.y, SHARE);  // so many tiles are worth a part
  if (!list.has_share(blockIdx.y)) return;
  const Share share(list, blockIdx.y);
  block_sync();
  // Of a group two places for parts: the rest of a sequence, and the start of another.
  auto place = [&](const Stretch& stretch) {
    return 2 * (share.group * int(gridDim.x) + unit) + stretch.starts();
  };

  if (warpgroup_id() == 0) {
    setmaxnreg_dec<COPY_REGISTERS>();
    copier.run(s, g_table, share);
  } else if (warpgroup_id() == 1) {
    setmaxnreg_inc<SCORE_REGISTERS>();
    Scorer scorer(s, g_q, h0, rows, sigma);
    share.for_stretches([&](const Stretch& stretch) {
      const int b = stretch.at.b;
      if (unit == 0 && threadIdx.x == WARPGROUP) {
        if (stretch.starts()) store_global(g_cuts.at(b), share.group);
        if (stretch.ends()) store_global(g_cuts.at(b) + 1, share.group);
      }
      if (stretch.t == 0) scorer.start_loading_q(b);
      scorer.run(stretch, stretch.whole() ? g_lse.at(b, h0) : g_part_lse.at(place(stretch)));
    });
  } else {
    setmaxnreg_inc<SUM_REGISTERS>();
    const int col0 = (warpgroup_id() - 2) * COLS;
    share.for_stretches([&](const Stretch& stretch) {
      Output r_o;
      sum(s, stretch, warp_uniform(col0), r_o);
      if (stretch.whole())
        r_o.store(g_o.at(stretch.at.b, 0, h0) + col0, g_o.stride[2], rows);
      else
        r_o.store(g_part.at(place(stretch)) + col0, LATENT, rows);
    });
  }
}

struct MergeSmem {
  Quad room[MERGERS / WARP][ROOM * WARP];
};

/// The sequences that shares have cut: O and LSE from their parts. A thread has four columns.
KERNEL(MERGERS, 1)
mla_hopper_merge(const View<Element, 4> g_o, const View<float, 3> g_lse, const View<float, 3> g_part,
                 const View<float, 2> g_part_lse, const View<int, 2> g_cuts, int HEADS) {
  const int b = blockIdx.y, first = load_global(g_cuts.at(b)), last = load_global(g_cuts.at(b) + 1);
  if (first == last) return;
  Quad* room = dynamic_smem<MergeSmem>().room[warp_id()];
#pragma unroll 1
  for (int h = blockIdx.x; h < HEADS; h += gridDim.x) {
    const Parts parts = parts_of_groups(g_part, g_part_lse, h / ROWS, ceil_div(HEADS, ROWS), first, last);
    const int col = threadIdx.x * 4;
    float lse;
    store_quad(g_o.at(b, 0, h) + col, parts.merged<ROOM>(room, h % ROWS, col, true, lse));
    if (threadIdx.x == 0) store_global(g_lse.at(b, h), lse);
  }
}

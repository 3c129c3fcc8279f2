// flash_hopper: FlashAttention-3's forward (Shah et al. 2024) with what sm_90a has: copies that run by
// themselves, products that run by themselves, and warps that only start them.
//
//   S = Q Kᵀ    m' = max(m, rowmax S)    P = e^{σ(S − m')}    l = e^{σ(m − m')} l + rowsum P
//   O = e^{σ(m − m')} O + P V            at the end: O / l and LSE = σ m + ln l
//   WINDOW, SOFTCAP, SINKS, VARLEN: as in flash.cu
//
// grid    as many blocks as multiprocessors; each takes one tile of queries after the other, see orders.cuh
// block   a warpgroup of which one warp gives orders and three copy Q, K and V; and CONSUMERS that multiply: each of
//         these owns 64 query rows, with whole rows of S, P and O in registers
// smem    rings of Q_STAGES tiles of Q for each consumer, and of STAGES tiles of K and of V; with O_STAGED a tile
//         of O for each, by which it is stored, otherwise O goes from registers; what is copied has two mbarriers:
//         full, which the bytes complete, and empty, on which readers arrive
// turns   with TURNS a warpgroup starts its products only when it is its turn, so that the softmax of one runs
//         beside the products of another
// order   keys from the last tile to the first, so that the masked ones come first; while O += P V of one tile
//         runs, so does S of the next, whose softmax needs neither; and while O of one tile of queries is
//         completed and stored, so does S of the next one's first keys
// bytes   for a tile of queries: Q once, every visible tile of K and V once, and O and LSE once
// VARLEN  copies are of whole tiles, with what lies behind a sequence: keys there are masked, values zeroed,
//         and rows of O there are left alone by plain stores of those before
// PAGE_SIZE  each lane of the warp that copies keys has a box of the tile, of one page; boxes behind a
//         sequence's end come from no page and are zeros
#include "prefill/orders.cuh"
#include "prim/sink.cuh"
#include "prim/softcap.cuh"
#include "prim/softmax.cuh"
#include "prim/stmatrix.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"
#include "prim/wide_rows.cuh"

constexpr int PANEL_COLS = 64;  // of 16 bits: the 128 bytes of a swizzle
constexpr int D_PAD = round_up(HEAD_DIM, PANEL_COLS), DV_PAD = round_up(VALUE_DIM, PANEL_COLS);
constexpr int CONSUMERS = BLOCK_M / WGMMA_ROWS, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32, CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "as many registers as the block has are to be shared out");

using QTile = SwizzledTile<Element, WGMMA_ROWS, D_PAD>;
using KTile = SwizzledTile<Element, BLOCK_N, D_PAD>;
using VTile = SwizzledTile<Element, BLOCK_N, DV_PAD>;

struct Smem {
  QTile q[Q_STAGES + O_STAGED][CONSUMERS];
  KTile k[STAGES];
  VTile v[STAGES];
  OrderSlot order;
  Mbarrier q_full[Q_STAGES][CONSUMERS], q_empty[Q_STAGES][CONSUMERS];
  Mbarrier k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];

  METHOD QTile& o(int group) { return q[Q_STAGES][group]; }
};
static_assert(DV_PAD <= D_PAD, "O has as much memory as Q");
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// The i-th use of a ring: which stage, and the parity of its phase.
template <int RING> struct Use {
  uint32_t stage, parity;
  METHOD explicit Use(uint32_t i) : stage(i % RING), parity(i / RING % 2) {}
};

/// Starts to copy rows of a tile, from its row `first` on, panel by panel.
template <class Tile>
DEVICE void copy(Tile& s_tile, int first, const TensorMap& map, int b, int row, int h,
                 Mbarrier& s_full SITE) {
#pragma unroll
  for (int i = 0; i < Tile::PANELS; ++i) {
    const int at[] = {i * PANEL_COLS, h, row, b};
    tma_load(s_tile.panel(i) + first * PANEL_COLS, map, at, s_full AT_SITE);
  }
}

/// Starts to copy a tile whose first row is `row`.
template <class Tile>
DEVICE void load(Tile& s_tile, const TensorMap& map, int b, int row, int h, Mbarrier& s_full SITE) {
  mbarrier_arrive_expect_tx(s_full, Tile::PANELS * Tile::PANEL_BYTES AT_SITE);
  copy(s_tile, 0, map, b, row, h, s_full AT_SITE);
}

/// The same of keys or values, by a warp, whose lanes share out pages.
template <class Tile>
DEVICE void load_keys(Tile& s_tile, const TensorMap& map, const Work::Place& at, int h, Mbarrier& s_full SITE) {
  if constexpr (PAGE_SIZE > 0) {
    if (lane_id() == 0) mbarrier_arrive_expect_tx(s_full, Tile::PANELS * Tile::PANEL_BYTES AT_SITE);
    warp_sync();
    if (lane_id() < BOXES) copy(s_tile, lane_id() * BOX, map, at.b, at.row, h, s_full AT_SITE);
  } else if (elect_one()) {
    load(s_tile, map, at.b, at.row, h, s_full AT_SITE);
  }
}

/// What one warp does: it copies queries.
DEVICE void produce_queries(Smem& s, const TensorMap& q, const Sizes& size) {
  Orders orders{s.order, size};
#pragma unroll 1
  for (uint32_t taken = 0;; ++taken) {
    const Order order = orders.hear_and_ask();
    if (order.m0 < 0) return;
    const Use<Q_STAGES> use(taken);
#pragma unroll
    for (int g = 0; g < CONSUMERS; ++g) {
      mbarrier_wait(s.q_empty[use.stage][g], use.parity ^ 1);
      if (elect_one())
        load(s.q[use.stage][g], q, order.seq.b, order.seq.q0 + order.m0 + g * WGMMA_ROWS, order.h,
             s.q_full[use.stage][g]);
    }
  }
}

/// What two others do: they copy keys, and values. One of them says when the block is to have its next tile: it
/// ASKS_LAST, when it has started its last copy of this one.
template <bool ASKS_LAST, class Tile>
DEVICE void produce_keys(Smem& s, Tile (&s_tiles)[STAGES], Mbarrier (&s_full)[STAGES],
                         Mbarrier (&s_empty)[STAGES], const TensorMap& map, const Sizes& size) {
  Orders orders{s.order, size};
  uint32_t used = 0;
#pragma unroll 1
  while (true) {
    const Order order = ASKS_LAST ? orders.hear() : orders.hear_and_ask();
    if (order.m0 < 0) return;
    const Work work(order, size);
    const int kv_head = work.h / size.GROUP;
#pragma unroll 1
    for (int i = 0; i < work.tiles; ++i) {
      const Use<STAGES> use(used++);
      const Work::Place at = work.place(i, size);
      mbarrier_wait(s_empty[use.stage], use.parity ^ 1);
      load_keys(s_tiles[use.stage], map, at, kv_head, s_full[use.stage]);
    }
    if (ASKS_LAST) orders.ask();
  }
}

/// Says that this warpgroup has left a stage.
DEVICE void release(Mbarrier& s_empty SITE) {
  if (threadIdx.x % WARPGROUP == 0) mbarrier_arrive(s_empty AT_SITE);
}

/// The factors by which a softmax step wants earlier sums rescaled, kept until these may be touched: to
/// `Softmax::update` an accumulator of one column in each half row.
struct Rescale {
  static constexpr int N_TILES = 1;
  float tile[1][1][4] = {{{1.f, 1.f, 1.f, 1.f}}};

  /// NOTE: late tiles seldom raise a maximum. A look at all factors pays where there is much to multiply.
  template <class Acc> METHOD void apply(Acc& r_o) const {
    if (Acc::COLS >= 192 && !warp_any(tile[0][0][0] != 1.f || tile[0][0][2] != 1.f)) return;
#pragma unroll
    for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) r_o.tile[0][n][e] *= tile[0][0][e];
  }
};

/// Whose products may be started: the warpgroups pass the turn round, the first one begins. Barriers 1, 2, …
/// NOTE: in the end it is passed to one that has left; a block may leave with such an arrival.
struct Turn {
  static constexpr int THREADS_OF_TWO = 2 * WARPGROUP;
  int group;

  METHOD static int barrier(int group) { return 1 + group % CONSUMERS; }
  METHOD void begin(SITE_ONLY) const {
    if (TURNS && group == CONSUMERS - 1) named_arrive(barrier(0), THREADS_OF_TWO AT_SITE);
  }
  METHOD void take(SITE_ONLY) const {
    if (TURNS) named_sync(barrier(group), THREADS_OF_TWO AT_SITE);
  }
  METHOD void pass(SITE_ONLY) const {
    if (TURNS) named_arrive(barrier(group + 1), THREADS_OF_TWO AT_SITE);
  }
};

/// Lays a warp's 16 rows into shared memory and starts to store them; its warpgroup's begin at `g_row0`.
template <class Acc>
DEVICE void start_store(QTile& s_tile, Acc& r_o, const TensorMap& o, int b, int g_row0, int h) {
  if (elect_one()) bulk_wait_read<0>();  // of what it stored before
  warp_sync();
  const int warp_row0 = warp_in_group() * MMA_M, lane = computed_anew(lane_id());
  const int row = warp_row0 + lane % MMA_M, col = lane / MMA_M * MMA_N;
#pragma unroll
  for (int n = 0; n < Acc::N_TILES; n += 2) {
    const float(&left)[4] = r_o.tile[0][n], (&right)[4] = r_o.tile[0][n + 1];
    const uint32_t r[] = {pack2<Element>(left[0], left[1]), pack2<Element>(left[2], left[3]),
                          pack2<Element>(right[0], right[1]), pack2<Element>(right[2], right[3])};
    stmatrix_x4(s_tile.at(row, col + n * MMA_N), r);
  }
  fence_proxy_async();
  warp_sync();
  if (elect_one()) {
#pragma unroll
    for (int i = 0; i < DV_PAD / PANEL_COLS; ++i) {
      const int at[] = {i * PANEL_COLS, h, g_row0 + warp_row0, b};
      tma_store(o, at, s_tile.panel(i) + warp_row0 * PANEL_COLS);
    }
    bulk_commit();
  }
}

/// Where results go: O by bulk copies and by plain stores, and LSE.
struct Output {
  const TensorMap& o;
  const View<Element, 4>& g_o;
  const View<float, 3>& g_lse;
  float sigma;

  METHOD Element* row(const Order& work, int row0) const { return g_o.at(work.seq.b, work.seq.q0 + row0, work.h); }
  METHOD void store_lse(const Order& work, int row, const SoftmaxRow& state) const {
    if (row < work.seq.M)
      store_global(g_lse.at(work.seq.b, work.h) + work.seq.q0 + row, state.lse(sigma));
  }
};

/// A tile of queries that see no key: O is 0, and LSE that of `none`, the state they begin with. A warp does it.
template <class State> DEVICE void store_nothing(const Work& work, const Output& to, State none) {
  none.finish();
  constexpr int PER_ROW = VALUE_DIM / 8;
  const int rows = min(BLOCK_M, work.seq.M - work.m0);
#pragma unroll 1
  for (int at = lane_id(); at < rows * PER_ROW; at += WARP)
    store_global(reinterpret_cast<Vec16*>(to.row(work, work.m0 + at / PER_ROW) + at % PER_ROW * 8), Vec16{});
#pragma unroll 1
  for (int row = lane_id(); row < rows; row += WARP) to.store_lse(work, work.m0 + row, none.row[0][0]);
}

/// A warpgroup's 64 rows of one tile of queries after the other, from the first product to the last.
struct Consumer {
  Smem& s;
  const Sizes& size;
  const Turn turn;
  const float sigma2;
  Orders orders{s.order, size};
  Work work;
  uint32_t taken = -1u, used = 0;  // tiles of queries before this one, and of keys
  WarpgroupAccumulator<WGMMA_ROWS, DV_PAD> r_o;
  WarpgroupAccumulator<WGMMA_ROWS, BLOCK_N> r_s;
  WarpgroupFragments<WGMMA_ROWS, BLOCK_N> r_p;
  Softmax<MMA_M, true> softmax;

  METHOD Consumer(Smem& s, const Sizes& size, Turn turn, float sigma2)
      : s(s), size(size), turn(turn), sigma2(sigma2), work({}, size) {
    work.tiles = 0;
  }

  /// Where tile i of keys lies, and where Q does; the warp knows it as one, so that descriptors are made in uniform
  /// registers.
  METHOD Use<STAGES> use_of(int i) const { return Use<STAGES>(warp_uniform(used + i)); }
  METHOD Use<Q_STAGES> queries() const { return Use<Q_STAGES>(taken); }

  /// Leaves this tile of queries, whose last tile of keys has number −1 then; what comes next.
  METHOD Order leave() {
    used += work.tiles;
    ++taken;
    return orders.hear_and_ask();
  }
  /// Starts S = Q Kᵀ of a tile.
  METHOD void start_scores(const Use<STAGES>& use) {
    mbarrier_wait(s.k_full[use.stage], use.parity);
    wgmma_fence(r_s);
    wgmma_abt<Element>(r_s, s.q[queries().stage][turn.group], 0, s.k[use.stage], false);
    wgmma_commit();
  }
  /// The same of the first one of the next queries, once these are there.
  METHOD void begin(const Order& next) {
    work = Work(next, size);
    const Use<Q_STAGES> use = queries();
    mbarrier_wait(s.q_full[use.stage][turn.group], use.parity);
    turn.take();
    start_scores(use_of(0));
    turn.pass();
  }
  /// Gives back what S of tile i was made of.
  METHOD void release_keys(int i, const Use<STAGES>& use) {
    release(s.k_empty[use.stage]);
    if (i == work.tiles - 1) release(s.q_empty[queries().stage][turn.group]);
  }
  /// Starts O += P V of a tile.
  METHOD void start_output(const Use<STAGES>& use) {
    mbarrier_wait(s.v_full[use.stage], use.parity);
    wgmma_fence(r_o, r_p);
    wgmma_ab<Element>(r_o, r_p, s.v[use.stage], true);
    wgmma_commit();
  }
  METHOD void finish_output(const Use<STAGES>& use) {
    wgmma_wait<0>(r_o, r_p);
    release(s.v_empty[use.stage]);
  }
  METHOD void cap() {
    if constexpr (SOFTCAP) cap_scores(r_s, size.squash);
  }
  METHOD void mask(int i) {
    work.sight(size).mask(r_s, work.m0 + turn.group * WGMMA_ROWS, work.key0(i));
  }
  /// Zeroes what a tile has behind the sequence's last value: 0 · NaN of a neighbour is NaN.
  METHOD void clear_neighbours(int i) {
    const int rows = work.seq.N - work.key0(i);
    if (rows >= BLOCK_N) return;
    const Use<STAGES> use = use_of(i);
    mbarrier_wait(s.v_full[use.stage], use.parity);
    constexpr int PER_ROW = DV_PAD / 8, ALL = CONSUMERS * WARPGROUP;
    for (int at = rows * PER_ROW + threadIdx.x - WARPGROUP; at < BLOCK_N * PER_ROW; at += ALL)
      store_shared(reinterpret_cast<Vec16*>(s.v[use.stage].at(at / PER_ROW, at % PER_ROW * 8)), Vec16{});
    fence_proxy_async();
    named_sync(1 + CONSUMERS, ALL);
  }
  /// P of the first tile, whose S is there.
  METHOD void first_step() {
    release_keys(0, use_of(0));
    cap();
    mask(0);
    Rescale nothing;
    softmax.update(r_s, nothing, sigma2);
    r_p.template round<Element>(r_s);
    if (VARLEN) clear_neighbours(0);
    r_o.clear();
  }
  /// P of tile i, its softmax beside O += P V of the tile before.
  template <bool MASKED> METHOD void step(int i) {
    const Use<STAGES> keys = use_of(i), values = use_of(i - 1);
    turn.take();
    start_scores(keys);
    start_output(values);
    turn.pass();
    wgmma_wait<1>(r_s);
    release_keys(i, keys);
    cap();
    if constexpr (MASKED) mask(i);
    Rescale rescale;
    softmax.update(r_s, rescale, sigma2);
    finish_output(values);
    rescale.apply(r_o);
    r_p.template round<Element>(r_s);
  }

  /// From S of the first tile to P of the last.
  METHOD void run() {
    const int tiles = work.tiles;
    first_step();
    int i = 1;
#pragma unroll 1
    for (; i < min(work.whole, tiles); ++i) step<true>(i);
#pragma unroll 1
    for (; i < (WINDOW ? work.part : tiles); ++i) step<false>(i);
    if constexpr (WINDOW) {
#pragma unroll 1
      for (; i < tiles; ++i) step<true>(i);
    }
  }
  /// Writes O and LSE of what it has gone on from.
  METHOD void store(const Order& done, const Output& to) {
    release(s.v_empty[use_of(-1).stage]);
    softmax.finish();
    softmax.normalise(r_o);
    const int row0 = done.m0 + turn.group * WGMMA_ROWS, rows = done.seq.M - row0;
    if (!O_STAGED || (VARLEN && rows < (warp_in_group() + 1) * MMA_M))  // not over the next sequence's rows
      store_wide_rows<Element>(to.row(done, row0), to.g_o.stride[1], r_o, rows, VALUE_DIM);
    else
      start_store(s.o(turn.group), r_o, to.o, done.seq.b, done.seq.q0 + row0, done.h);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (lane_id() % 4 == 0) to.store_lse(done, row0 + r_o.row(0, half), softmax.row[0][half]);
  }
};

KERNEL(THREADS, 1)
flash_hopper(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
             const View<Element, 4> g_o, const View<float, 3> g_lse, int B, int H, int M, int N, int GROUP,
             int section, float sigma, int left, int right, float squash, const float* g_sinks,
             const int* g_begin_q, const int* g_begin_k, const View<const int, 2> g_table, int* g_taken) {
  Smem& s = dynamic_smem<Smem>();
  const Sizes size{B, H, M, N, GROUP, section, left, right, squash, g_begin_q, g_begin_k, g_table};
  if (threadIdx.x == 0) {
    s.order.init(3 + CONSUMERS * WARPGROUP / WARP);
#pragma unroll
    for (int stage = 0; stage < Q_STAGES; ++stage)
#pragma unroll
      for (int g = 0; g < CONSUMERS; ++g)
        mbarrier_init(s.q_full[stage][g], 1), mbarrier_init(s.q_empty[stage][g], 1);
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(s.k_full[stage], 1), mbarrier_init(s.k_empty[stage], CONSUMERS);
      mbarrier_init(s.v_full[stage], 1), mbarrier_init(s.v_empty[stage], CONSUMERS);
    }
    fence_mbarrier_init();
  }
  block_sync();

  const Output to{o, g_o, g_lse, sigma};
  const auto begin = [&](int h) {
    Softmax<MMA_M, true> state;
    if constexpr (SINKS) begin_with_sink(state, g_sinks + h, sigma);
    return state;
  };
  if (warpgroup_id() == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    const auto blind = [&](const Work& work) { store_nothing(work, to, begin(work.h)); };
    if (warp_id() == 0) give_orders(s.order, size, g_taken, blind);
    if (warp_id() == 1) produce_queries(s, q, size);
    if (warp_id() == 2) produce_keys<true>(s, s.k, s.k_full, s.k_empty, k, size);
    if (warp_id() == 3) produce_keys<false>(s, s.v, s.v_full, s.v_empty, v, size);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const Turn turn{warp_uniform(warpgroup_id() - 1)};
    turn.begin();
    Consumer consumer(s, size, turn, sigma * LOG2_E);
    Order next = consumer.leave();
    if (next.m0 < 0) return;
    consumer.begin(next);
    wgmma_wait<0>(consumer.r_s);
    while (true) {
      consumer.softmax = begin(consumer.work.h);
      consumer.run();
      const Order done = consumer.work;
      next = consumer.leave();
      // NOTE: from here on without a branch between a product's start and its wait: ptxas would serialise all.
      if (next.m0 < 0) {
        consumer.start_output(consumer.use_of(-1));
        wgmma_wait<0>(consumer.r_o, consumer.r_p);
        consumer.store(done, to);
        break;
      }
      consumer.start_output(consumer.use_of(-1));
      consumer.begin(next);
      wgmma_wait<1>(consumer.r_o, consumer.r_p);
      consumer.store(done, to);
      wgmma_wait<0>(consumer.r_s);
    }
    if (O_STAGED && elect_one()) bulk_wait_read<0>();
  }
}

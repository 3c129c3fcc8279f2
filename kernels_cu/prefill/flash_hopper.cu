// flash_hopper: FlashAttention-3's forward (Shah et al. 2024) with what sm_90a has: copies that run by
// themselves, products that run by themselves, and warps that only start them.
//
//   S = Q Kᵀ    m' = max(m, rowmax S)    P = e^{σ(S − m')}    l = e^{σ(m − m')} l + rowsum P
//   O = e^{σ(m − m')} O + P V            at the end: O / l and LSE = σ m + ln l
//   WINDOW, SOFTCAP, SINKS, VARLEN: as in flash.cu
//
// grid    as many blocks as multiprocessors; each takes one tile of queries after the other, see Schedule
// block   a warpgroup that copies, and CONSUMERS that multiply; each of these owns 64 query rows, with whole
//         rows of S, P and O in registers
// smem    a tile of Q for each consumer; one for its O, or with O_OVER_Q the same; rings of STAGES tiles of K
//         and of V; what is copied has two mbarriers: full, which the bytes complete, and empty, on which
//         readers arrive
// turns   with TURNS a warpgroup starts its products only when it is its turn, so that the softmax of one runs
//         beside the products of another
// order   keys from the last tile to the first, so that the masked ones come first; while O += P V of one tile
//         runs, so does S of the next, whose softmax needs neither
// bytes   for a tile of queries: Q once, every visible tile of K and V once, and O and LSE once
// VARLEN  copies are of whole tiles, with what lies behind a sequence: keys there are masked, values zeroed,
//         and rows of O there are left alone by plain stores of those before
// PAGE_SIZE  each lane of the warp that copies keys has a box of the tile, of one page; boxes behind a
//         sequence's end come from no page and are zeros
#include "prim/acc.cuh"
#include "prim/packed.cuh"
#include "prim/paging.cuh"
#include "prim/sight.cuh"
#include "prim/sink.cuh"
#include "prim/softcap.cuh"
#include "prim/softmax.cuh"
#include "prim/stmatrix.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"

constexpr int PANEL_COLS = 64;  // of 16 bits: the 128 bytes of a swizzle
constexpr int D_PAD = round_up(HEAD_DIM, PANEL_COLS), DV_PAD = round_up(VALUE_DIM, PANEL_COLS);
constexpr int CONSUMERS = BLOCK_M / WGMMA_ROWS, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32, CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr int BOXES = BLOCK_N / BOX;  // copies that bring a panel of keys
static_assert(BLOCK_N % BOX == 0 && BOXES <= WARP && (BOXES == 1 || BOX % 8 == 0), "a lane has a box");
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "as many registers as the block has are to be shared out");

using QTile = SwizzledTile<Element, WGMMA_ROWS, D_PAD>;
using KTile = SwizzledTile<Element, BLOCK_N, D_PAD>;
using VTile = SwizzledTile<Element, BLOCK_N, DV_PAD>;
struct Smem {
  QTile q[O_OVER_Q ? CONSUMERS : 2 * CONSUMERS];
  KTile k[STAGES];
  VTile v[STAGES];
  Mbarrier q_full[CONSUMERS], q_empty[CONSUMERS];
  Mbarrier k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];

  METHOD QTile& o(int group) { return q[O_OVER_Q ? group : CONSUMERS + group]; }
};
static_assert(DV_PAD <= D_PAD, "O takes the place of Q, or has as much");
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// The i-th use of a ring: which stage, and the parity of its phase.
struct Use {
  uint32_t stage, parity;
  METHOD explicit Use(uint32_t i) : stage(i % STAGES), parity(i / STAGES % 2) {}
};

struct Sizes {
  int B, H, M, N, GROUP, paired, left, right;
  float squash;
  const int *g_begin_q, *g_begin_k;
  View<const int, 2> g_table;
};

/// A tile of queries, and its keys, whose tiles are taken from the last to the first: number 0 to tiles − 1,
/// of which those from `whole` to `part` − 1 are seen whole.
struct Work {
  Sequence seq;
  int h, m0, end, tiles, whole, part;

  METHOD Work(const Sequence& seq, int h, int m_tile, const Sizes& size)
      : seq(seq), h(h), m0(m_tile * BLOCK_M) {
    const Tiles seen = sight(size).template tiles<BLOCK_N>(m0, min(m0 + BLOCK_M, seq.M) - 1);
    end = seen.end;
    tiles = seen.end - seen.first;
    whole = seen.end - seen.part;
    part = seen.end - seen.whole;
  }
  METHOD Sight<CAUSAL, WINDOW> sight(const Sizes& size) const {
    return {seq.M, seq.N, size.left, size.right};
  }
  /// First key of tile i.
  METHOD int key0(int i) const { return (end - 1 - i) * BLOCK_N; }

  /// Where the calling lane's box of tile i begins: at a row of an array, or of a page. NOTE: no page is number
  /// −1, and what is copied of it are zeros.
  struct Place {
    int b, row;
  };
  METHOD Place place(int i, const Sizes& size) const {
    if constexpr (PAGE_SIZE > 0) {
      const int key = key0(i) + lane_id() * BOX;
      const bool there = lane_id() < BOXES && key < seq.N;
      return {there ? page_of<PAGE_SIZE>(size.g_table.at(seq.i), key) : -1,
              key % PAGE_SIZE};
    }
    return {seq.b, seq.k0 + key0(i)};
  }
};

/// Which tiles of queries a block takes: the blocks take turns, head after head, so that keys and values are
/// still in the L2 cache. With PAIRS, for causal masks, a turn of the first `paired` heads is a long tile of one
/// and, second, the short one of the next that makes up for it. Rounds of them seldom end even; so turns of the
/// heads left are single tiles, the longest first, dealt out there and back. With VARLEN each sequence has as
/// many tiles as the longest, and those past its end are passed over; none are paired. One thread goes through it
/// `alone`, or a warp.
struct Schedule {
  const Sizes& size;
  const bool alone;
  int turn = blockIdx.x, taken = 0;
  bool second = false, back = false;
  Sequence packed;

  METHOD Schedule(const Sizes& size, bool alone) : size(size), alone(alone) { pass_over(); }

  METHOD bool over() const { return turn >= m_tiles() * heads() - turns_of_pairs(); }
  METHOD Work work() const {
    const Tile tile = this->tile();
    const int b = tile.head / size.H;
    const Sequence dense{b, b, 0, 0, size.M, size.N};
    return Work(VARLEN ? packed : dense, tile.head % size.H, tile.m, size);
  }
  METHOD void next() {
    advance();
    pass_over();
  }
  /// Whether there is no other; with VARLEN it may be that there is none and it says no.
  METHOD bool last() const {
    Schedule then = *this;
    then.advance();
    return then.over();
  }

 private:
  struct Tile {
    int head, m;
  };
  METHOD int m_tiles() const { return ceil_div(size.M, BLOCK_M); }
  METHOD int heads() const { return size.B * size.H; }
  METHOD int turns_of_pairs() const { return PAIRS && !VARLEN ? size.paired / 2 * m_tiles() : 0; }
  METHOD Tile tile() const {
    const int single = turn - turns_of_pairs(), last = m_tiles() - 1;
    if (!PAIRS || single < 0) {
      const int head = turn / m_tiles(), m = turn % m_tiles();
      if (!PAIRS) return {head, m};
      return second ? Tile{2 * head + 1, m} : Tile{2 * head, last - m};
    }
    const int first = VARLEN ? 0 : size.paired, left = heads() - first;
    return {first + single % left, last - single / left};
  }
  METHOD void advance() {
    ++taken;
    second = PAIRS && !second && turn < turns_of_pairs();
    if (!second) next_round();
  }
  METHOD int place() const { return back ? gridDim.x - 1 - blockIdx.x : blockIdx.x; }
  METHOD void next_round() {
    const int begin = turn - place() + gridDim.x;
    back = PAIRS && begin > turns_of_pairs() && !back;
    turn = begin + place();
  }
  METHOD void pass_over() {
    if constexpr (VARLEN)
      for (; !over(); next_round()) {
        const Tile tile = this->tile();
        const int i = tile.head / size.H;
        packed = alone ? packed_sequence_alone(size.g_begin_q, size.g_begin_k, i)
                       : packed_sequence(size.g_begin_q, size.g_begin_k, i);
        if (tile.m * BLOCK_M < packed.M) return;
      }
  }
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

/// The same of keys or values, whose pages the lanes of a warp share out; without pages one thread calls it.
template <class Tile>
DEVICE void load_keys(Tile& s_tile, const TensorMap& map, const Work::Place& at, int h, Mbarrier& s_full SITE) {
  if constexpr (PAGE_SIZE > 0) {
    if (lane_id() == 0) mbarrier_arrive_expect_tx(s_full, Tile::PANELS * Tile::PANEL_BYTES AT_SITE);
    warp_sync();
    if (lane_id() < BOXES) copy(s_tile, lane_id() * BOX, map, at.b, at.row, h, s_full AT_SITE);
  } else {
    load(s_tile, map, at.b, at.row, h, s_full AT_SITE);
  }
}

/// What one thread does: it copies queries.
DEVICE void produce_queries(Smem& s, const TensorMap& q, Schedule schedule) {
#pragma unroll 1
  for (; !schedule.over(); schedule.next()) {
    const Work work = schedule.work();
#pragma unroll
    for (int g = 0; g < CONSUMERS; ++g) {
      mbarrier_wait(s.q_empty[g], (schedule.taken + 1) % 2);
      load(s.q[g], q, work.seq.b, work.seq.q0 + work.m0 + g * WGMMA_ROWS, work.h, s.q_full[g]);
    }
  }
}

/// What another does, or its warp: it copies keys and values.
DEVICE void produce_keys(Smem& s, const TensorMap& k, const TensorMap& v, Schedule schedule) {
  uint32_t used = 0;
#pragma unroll 1
  for (; !schedule.over(); schedule.next()) {
    const Work work = schedule.work();
    const int kv_head = work.h / schedule.size.GROUP;
#pragma unroll 1
    for (int i = 0; i < work.tiles; ++i) {
      const Use use(used++);
      const Work::Place at = work.place(i, schedule.size);
      mbarrier_wait(s.k_empty[use.stage], use.parity ^ 1);
      load_keys(s.k[use.stage], k, at, kv_head, s.k_full[use.stage]);
      mbarrier_wait(s.v_empty[use.stage], use.parity ^ 1);
      load_keys(s.v[use.stage], v, at, kv_head, s.v_full[use.stage]);
    }
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
  METHOD void pass(bool last SITE) const {
    if (TURNS && !(last && group == CONSUMERS - 1)) named_arrive(barrier(group + 1), THREADS_OF_TWO AT_SITE);
  }
};

/// A warpgroup's 64 rows of one tile of queries, from the first product to the last.
struct Consumer {
  Smem& s;
  const Sizes& size;
  const Work work;
  const Turn turn;
  const uint32_t used;  // tiles of keys before this work's first
  const float sigma2;
  WarpgroupAccumulator<WGMMA_ROWS, DV_PAD> r_o;
  WarpgroupAccumulator<WGMMA_ROWS, BLOCK_N> r_s;
  WarpgroupFragments<WGMMA_ROWS, BLOCK_N> r_p;
  Softmax<MMA_M, true> softmax;

  METHOD Consumer(Smem& s, const Sizes& size, Work work, Turn turn, uint32_t used, float sigma2)
      : s(s), size(size), work(work), turn(turn), used(used), sigma2(sigma2) {}

  /// Where tile i of keys lies; the warp knows as one, so that descriptors are made in uniform registers.
  METHOD Use use_of(int i) const { return Use(warp_uniform(used + i)); }

  /// Starts S = Q Kᵀ of tile i.
  METHOD void start_scores(int i) {
    const Use use = use_of(i);
    mbarrier_wait(s.k_full[use.stage], use.parity);
    wgmma_fence(r_s);
    wgmma_abt<Element>(r_s, s.q[turn.group], 0, s.k[use.stage], false);
    wgmma_commit();
  }
  /// Starts O += P V of tile i.
  METHOD void start_output(int i) {
    const Use use = use_of(i);
    mbarrier_wait(s.v_full[use.stage], use.parity);
    wgmma_fence(r_o, r_p);
    wgmma_ab<Element>(r_o, r_p, s.v[use.stage], true);
    wgmma_commit();
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
    const Use use = use_of(i);
    mbarrier_wait(s.v_full[use.stage], use.parity);
    constexpr int PER_ROW = DV_PAD / 8, ALL = CONSUMERS * WARPGROUP;
    for (int at = rows * PER_ROW + threadIdx.x - WARPGROUP; at < BLOCK_N * PER_ROW; at += ALL)
      store_shared(reinterpret_cast<Vec16*>(s.v[use.stage].at(at / PER_ROW, at % PER_ROW * 8)), Vec16{});
    fence_proxy_async();
    named_sync(1 + 2 * CONSUMERS, ALL);
  }
  METHOD void finish_output(int i) {
    wgmma_wait<0>(r_o, r_p);
    release(s.v_empty[use_of(i).stage]);
  }
  /// S of tile i and its softmax, where some row does not see all of it.
  METHOD void masked_step(int i, bool last) {
    if (i > 0) start_output(i - 1), finish_output(i - 1);
    turn.take();
    start_scores(i);
    turn.pass(last);
    wgmma_wait<0>(r_s);
    release(s.k_empty[use_of(i).stage]);
    cap();
    mask(i);
    softmax.update(r_s, r_o, sigma2);
    r_p.template round<Element>(r_s);
    if (VARLEN && i == 0) clear_neighbours(i);
  }
  /// The same of a tile that every row sees, beside O += P V of the tile before.
  METHOD void step(int i, bool last) {
    turn.take();
    start_scores(i);
    start_output(i - 1);
    turn.pass(last);
    wgmma_wait<1>(r_s);
    release(s.k_empty[use_of(i).stage]);
    cap();
    Rescale rescale;
    softmax.update(r_s, rescale, sigma2);
    finish_output(i - 1);
    rescale.apply(r_o);
    r_p.template round<Element>(r_s);
  }

  METHOD void run(bool last) {
    const int tiles = work.tiles, whole = max(work.whole, 1);
    r_o.clear();
    int i = 0;
#pragma unroll 1
    for (; i < min(whole, tiles); ++i) masked_step(i, last && i == tiles - 1);
#pragma unroll 1
    for (; i < (WINDOW ? work.part : tiles); ++i) step(i, last && i == tiles - 1);
    if constexpr (WINDOW) {
#pragma unroll 1
      for (; i < tiles; ++i) masked_step(i, last && i == tiles - 1);
    }
    if (!O_OVER_Q && lane_id() == 0) mbarrier_arrive(s.q_empty[turn.group]);
    if (tiles > 0) start_output(tiles - 1), finish_output(tiles - 1);
    softmax.finish();
    softmax.normalise(r_o);
  }
};

/// Lays a warp's 16 rows into shared memory and starts to store them; its warpgroup's begin at `g_row0`.
template <class Acc>
DEVICE void start_store(QTile& s_tile, Acc& r_o, const TensorMap& o, int b, int g_row0, int h) {
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

KERNEL(THREADS, 1)
flash_hopper(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
             const View<Element, 4> g_o, const View<float, 3> g_lse, int B, int H, int M, int N, int GROUP,
             int paired, float sigma, int left, int right, float squash, const float* g_sinks, const int* g_begin_q,
             const int* g_begin_k, const View<const int, 2> g_table) {
  Smem& s = dynamic_smem<Smem>();
  const Sizes size{B, H, M, N, GROUP, paired, left, right, squash, g_begin_q, g_begin_k, g_table};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int g = 0; g < CONSUMERS; ++g)
      mbarrier_init(s.q_full[g], 1), mbarrier_init(s.q_empty[g], WARPGROUP / WARP);
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(s.k_full[stage], 1), mbarrier_init(s.k_empty[stage], CONSUMERS);
      mbarrier_init(s.v_full[stage], 1), mbarrier_init(s.v_empty[stage], CONSUMERS);
    }
    fence_mbarrier_init();
  }
  block_sync();

  if (warpgroup_id() == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    constexpr bool ALONE = PAGE_SIZE == 0;
    if (warp_id() == 0 && (!ALONE || elect_one())) produce_keys(s, k, v, Schedule(size, ALONE));
    if (warp_id() == 1 && elect_one()) produce_queries(s, q, Schedule(size, true));
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const Turn turn{warp_uniform(warpgroup_id() - 1)};
    const int group = turn.group;
    Schedule schedule(size, false);
    uint32_t used = 0;
    turn.begin();
#pragma unroll 1
    for (; !schedule.over(); schedule.next()) {
      Consumer consumer(s, size, schedule.work(), turn, used, sigma * LOG2_E);
      if constexpr (SINKS) begin_with_sink(consumer.softmax, g_sinks + consumer.work.h, sigma);
      mbarrier_wait(s.q_full[group], schedule.taken % 2);
      consumer.run(schedule.last());
      used += consumer.work.tiles;

      schedule.turn = computed_anew(schedule.turn);
      const Work work = schedule.work();
      const int row0 = work.m0 + group * WGMMA_ROWS;
      if (O_OVER_Q) named_sync(1 + CONSUMERS + group, WARPGROUP);  // no warp's product reads the queries
      if (VARLEN && row0 + (warp_in_group() + 1) * MMA_M > work.seq.M)  // not over the next sequence's rows
        store_rows<Element>(g_o.at(0, work.seq.q0 + row0, work.h), g_o.stride[1], consumer.r_o,
                            work.seq.M - row0, VALUE_DIM);
      else
        start_store(s.o(group), consumer.r_o, o, work.seq.b, work.seq.q0 + row0, work.h);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = consumer.r_o.row(0, half) + row0;
        if (row < work.seq.M && lane_id() % 4 == 0)
          store_global(g_lse.at(work.seq.b, work.h) + work.seq.q0 + row,
                       consumer.softmax.row[0][half].lse(sigma));
      }
      if (elect_one()) {
        bulk_wait_read<0>();
        if (O_OVER_Q) mbarrier_arrive(s.q_empty[group]);
      }
      warp_sync();
    }
  }
}

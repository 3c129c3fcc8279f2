// flash_hopper: FlashAttention-3's forward (Shah et al. 2024) with what sm_90a has: copies that run by
// themselves, products that run by themselves, and warps that only start them.
//
//   S = Q Kᵀ    m' = max(m, rowmax S)    P = e^{σ(S − m')}    l = e^{σ(m − m')} l + rowsum P
//   O = e^{σ(m − m')} O + P V            at the end: O / l and LSE = σ m + ln l
//
// grid    (ceil(M / BLOCK_M), H, B); with a causal mask the longest tiles start first
// block   a warpgroup that copies, and CONSUMERS that multiply; each of these owns 64 query rows, with whole
//         rows of S, P and O in registers
// smem    one tile of Q; rings of STAGES tiles of K and of V, each with two mbarriers: full, which the bytes
//         complete, and empty, on which every consumer arrives
// turns   with TURNS a warpgroup starts its products only when it is its turn, so that the softmax of one runs
//         beside the products of another
// order   keys from the last tile to the first, so that the masked ones come first; while O += P V of one tile
//         runs, so does S of the next, whose softmax needs neither
// bytes   a block reads its Q tile once and every visible tile of K and V once, and writes its O tile and LSE
//         once
#include "prim/acc.cuh"
#include "prim/mask.cuh"
#include "prim/softmax.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"

constexpr int PANEL_COLS = 64;  // of 16 bits: the 128 bytes of a swizzle
constexpr int D_PAD = round_up(HEAD_DIM, PANEL_COLS);
constexpr int CONSUMERS = BLOCK_M / WGMMA_ROWS, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32, CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "as many registers as the block has are to be shared out");

using QTile = SwizzledTile<Element, BLOCK_M, D_PAD>;
using KVTile = SwizzledTile<Element, BLOCK_N, D_PAD>;
struct Smem {
  QTile q;
  KVTile k[STAGES], v[STAGES];
  Mbarrier q_full, k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
};
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// The i-th use of a ring: which stage, and the parity of its phase.
struct Use {
  int stage;
  uint32_t parity;
  METHOD explicit Use(int i) : stage(i % STAGES), parity(i / STAGES % 2) {}
};

/// A block's queries, and its keys: tiles 0…tiles − 1, of which those from `whole` on are seen in part.
struct Work {
  int b, h, m0, rows, tiles, whole;

  METHOD Work(int M, int N) : b(blockIdx.z), h(blockIdx.y) {
    m0 = (CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BLOCK_M;
    rows = min(M - m0, BLOCK_M);
    tiles = ceil_div(max(visible_keys(CAUSAL, m0 + rows - 1, M, N), 0), BLOCK_N);
    whole = max(visible_keys(CAUSAL, m0, M, N), 0) / BLOCK_N;
  }
  /// First key of the i-th tile in the order in which they are taken.
  METHOD int key0(int i) const { return (tiles - 1 - i) * BLOCK_N; }
};

/// Starts to copy a tile whose first row is `row`, panel by panel.
template <class Tile>
DEVICE void load(Tile& s_tile, const TensorMap& map, int b, int row, int h, Mbarrier& s_full SITE) {
  mbarrier_arrive_expect_tx(s_full, Tile::PANELS * Tile::PANEL_BYTES AT_SITE);
#pragma unroll
  for (int i = 0; i < Tile::PANELS; ++i) {
    const int at[] = {i * PANEL_COLS, h, row, b};
    tma_load(s_tile.panel(i), map, at, s_full AT_SITE);
  }
}

/// What one thread of the copying warpgroup does.
DEVICE void produce(Smem& s, const TensorMap& q, const TensorMap& k, const TensorMap& v, const Work& work,
                    int kv_head) {
  load(s.q, q, work.b, work.m0, work.h, s.q_full);
#pragma unroll 1
  for (int i = 0; i < work.tiles; ++i) {
    const Use use(i);
    mbarrier_wait(s.k_empty[use.stage], use.parity ^ 1);
    load(s.k[use.stage], k, work.b, work.key0(i), kv_head, s.k_full[use.stage]);
    mbarrier_wait(s.v_empty[use.stage], use.parity ^ 1);
    load(s.v[use.stage], v, work.b, work.key0(i), kv_head, s.v_full[use.stage]);
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

  template <class Acc> METHOD void apply(Acc& r_o) const {
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

/// A warpgroup's 64 rows, from the first product to the last.
struct Consumer {
  Smem& s;
  const Work& work;
  const Turn turn;
  int row0, M, N;
  float sigma2;
  WarpgroupAccumulator<WGMMA_ROWS, D_PAD> r_o;
  WarpgroupAccumulator<WGMMA_ROWS, BLOCK_N> r_s;
  WarpgroupFragments<WGMMA_ROWS, BLOCK_N> r_p;
  Softmax<MMA_M> softmax;

  METHOD Consumer(Smem& s, const Work& work, int group, int M, int N, float sigma2)
      : s(s), work(work), turn{group}, row0(group * WGMMA_ROWS), M(M), N(N), sigma2(sigma2) {}

  /// Starts S = Q Kᵀ of tile i.
  METHOD void start_scores(int i) {
    const Use use(i);
    mbarrier_wait(s.k_full[use.stage], use.parity);
    wgmma_fence(r_s);
    wgmma_abt<Element>(r_s, s.q, row0, s.k[use.stage], false);
    wgmma_commit();
  }
  /// Starts O += P V of tile i.
  METHOD void start_output(int i) {
    const Use use(i);
    mbarrier_wait(s.v_full[use.stage], use.parity);
    wgmma_fence(r_o, r_p);
    wgmma_ab<Element>(r_o, r_p, s.v[use.stage], true);
    wgmma_commit();
  }
  METHOD void mask(int i) {
    if (work.tiles - 1 - i >= work.whole)
      mask_scores(r_s, CAUSAL, work.m0 + row0, work.key0(i), M, N);
  }

  METHOD void run() {
    r_o.clear();
    if (work.tiles == 0) return;
    turn.begin();
    turn.take();
    start_scores(0);
    turn.pass(work.tiles == 1);
    wgmma_wait<0>(r_s);
    release(s.k_empty[0]);
    mask(0);
    softmax.update(r_s, r_o, sigma2);
    r_p.template round<Element>(r_s);
#pragma unroll 1
    for (int i = 1; i < work.tiles; ++i) {
      turn.take();
      start_scores(i);
      start_output(i - 1);
      turn.pass(i == work.tiles - 1);
      wgmma_wait<1>(r_s);
      release(s.k_empty[Use(i).stage]);
      mask(i);
      Rescale rescale;
      softmax.update(r_s, rescale, sigma2);
      wgmma_wait<0>(r_o, r_p);
      release(s.v_empty[Use(i - 1).stage]);
      rescale.apply(r_o);
      r_p.template round<Element>(r_s);
    }
    start_output(work.tiles - 1);
    wgmma_wait<0>(r_o, r_p);
  }
};

KERNEL(THREADS, 1)
flash_hopper(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ TensorMap v, const View<Element, 4> g_o, const View<float, 3> g_lse,
             int M, int N, int GROUP, float sigma) {
  Smem& s = dynamic_smem<Smem>();
  const Work work(M, N);
  if (threadIdx.x == 0) {
    mbarrier_init(s.q_full, 1);
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
    if (warp_id() == 0 && elect_one()) produce(s, q, k, v, work, work.h / GROUP);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    mbarrier_wait(s.q_full, 0);
    Consumer consumer(s, work, warpgroup_id() - 1, M, N, sigma * LOG2_E);
    consumer.run();

    const int row0 = consumer.row0, rows = work.rows - row0;
    Softmax<MMA_M>& softmax = consumer.softmax;
    softmax.finish();
    softmax.normalise(consumer.r_o);
    store_rows(g_o.at(work.b, work.m0 + row0, work.h), g_o.stride[1], consumer.r_o, rows, HEAD_DIM);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = consumer.r_o.row(0, half);
      if (row < rows && lane_id() % 4 == 0)
        store_global(g_lse.at(work.b, work.h) + work.m0 + row0 + row, softmax.row[0][half].lse(sigma));
    }
  }
}

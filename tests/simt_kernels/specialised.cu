// Warp-specialised attention, all of sm_90 at once: one warp starts bulk copies into a ring of stages, two
// warpgroups multiply. FAULT plants one. Runs on both machines.
#include "prim/acc.cuh"
#include "prim/softmax.cuh"
#include "prim/tma.cuh"
#include "prim/wgmma.cuh"

constexpr int STAGES = 2;

struct Smem {
  SwizzledTile<Element, 128, DEPTH> q;
  SwizzledTile<Element, COLS, DEPTH> k[STAGES], v[STAGES];
  Mbarrier q_full, k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
};

/// Starts to load a tile: a copy for each panel.
template <class Tile> DEVICE void load(Tile& s, const TensorMap& map, int row, Mbarrier& s_full SITE) {
  mbarrier_arrive_expect_tx(s_full, Tile::PANELS * Tile::PANEL_BYTES AT_SITE);
  for (int i = 0; i < Tile::PANELS; ++i) {
    const int at[] = {i * Tile::PANEL_COLS, row};
    tma_load(s.panel(i), map, at, s_full AT_SITE);
  }
}

DEVICE void produce(Smem& s, const TensorMap& q, const TensorMap& k, const TensorMap& v, int tiles) {
  load(s.q, q, 0, s.q_full);
  for (int i = 0; i < tiles; ++i) {
    const int stage = i % STAGES, parity = i / STAGES % 2;
    mbarrier_wait(s.k_empty[stage], parity ^ 1);
    load(s.k[stage], k, i * COLS, s.k_full[stage]);  // fills a stage of K
    mbarrier_wait(s.v_empty[stage], parity ^ 1);
    load(s.v[stage], v, i * COLS, s.v_full[stage]);
  }
}

DEVICE void release(Mbarrier& s_empty) {
  if (threadIdx.x % WARPGROUP == 0) mbarrier_arrive(s_empty);
}

KERNEL(384, 1)
attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
          const __grid_constant__ TensorMap v, Element* g_o, int tiles, float sigma2) {
  Smem& s = dynamic_smem<Smem>();
  if (threadIdx.x == 0) {
    mbarrier_init(s.q_full, 1);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(s.k_full[i], 1), mbarrier_init(s.v_full[i], 1);
      mbarrier_init(s.k_empty[i], 2), mbarrier_init(s.v_empty[i], 2);
    }
    fence_mbarrier_init();
  }
  block_sync();
  if (warpgroup_id() == 0) {
    setmaxnreg_dec<24>();
    if (warp_id() == 0 && elect_one()) produce(s, q, k, v, tiles);
  } else {
    setmaxnreg_inc<240>();
    const int row0 = (warpgroup_id() - 1) * 64;
    WarpgroupAccumulator<64, DEPTH> r_o;
    WarpgroupAccumulator<64, COLS> r_s;
    WarpgroupFragments<64, COLS> r_p;
    Softmax<MMA_M> softmax;
    r_o.clear();
    mbarrier_wait(s.q_full, 0);
    for (int i = 0; i < tiles; ++i) {
      const int stage = i % STAGES, parity = i / STAGES % 2;
      if (FAULT != 1) mbarrier_wait(s.k_full[stage], parity);
      wgmma_fence(r_s);
      wgmma_abt<Element>(r_s, s.q, row0, s.k[stage], false);  // reads a stage of K
      wgmma_commit();
      if (FAULT == 2) release(s.k_empty[stage]);
      wgmma_wait<0>(r_s);
      if (FAULT != 2) release(s.k_empty[stage]);
      softmax.update(r_s, r_o, sigma2);
      r_p.round<Element>(r_s);
      mbarrier_wait(s.v_full[stage], parity);
      wgmma_fence(r_o, r_p);
      wgmma_ab<Element>(r_o, r_p, s.v[stage], true);
      wgmma_commit();
      wgmma_wait<0>(r_o, r_p);
      release(s.v_empty[stage]);
    }
    softmax.finish();
    softmax.normalise(r_o);
    store_rows(g_o + row0 * DEPTH, DEPTH, r_o, 64, DEPTH);
  }
}

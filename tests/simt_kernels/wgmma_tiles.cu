// Tiles as kernels multiply them: A Bᵀ, and attention with P in registers, fed by plain stores. Runs on both machines.
#include "prim/acc.cuh"
#include "prim/mask.cuh"
#include "prim/softmax.cuh"
#include "prim/tile.cuh"
#include "prim/wgmma.cuh"

/// Rows of a tile from global memory, by THREADS threads.
template <int THREADS, class Tile> DEVICE void load_tile(Tile& s, const Element* g) {
  constexpr int CHUNKS = Tile::COLS / 8;
  for (int i = threadIdx.x; i < Tile::ROWS * CHUNKS; i += THREADS)
    store_shared(reinterpret_cast<Vec16*>(s.at(i / CHUNKS, i % CHUNKS * 8)),
                 load_global(reinterpret_cast<const Vec16*>(g) + i));
}

struct GemmSmem {
  SwizzledTile<Element, ROWS, DEPTH, WIDTH> a;
  SwizzledTile<Element, COLS, DEPTH, WIDTH> b;
};

/// D = A Bᵀ for ROWS rows of A and COLS rows of B.
KERNEL(128, 1) gemm(const Element* g_a, const Element* g_b, float* g_d) {
  GemmSmem& s = dynamic_smem<GemmSmem>();
  load_tile<128>(s.a, g_a);
  load_tile<128>(s.b, g_b);
  fence_proxy_async();
  block_sync();
  WarpgroupAccumulator<ROWS, COLS> acc;
  wgmma_fence(acc);
  wgmma_abt<Element>(acc, s.a, 0, s.b, false);
  wgmma_commit();
  wgmma_wait<0>(acc);
  store_rows(g_d, COLS, acc, ROWS, COLS);
}

struct AttentionSmem {
  SwizzledTile<Element, 128, DEPTH, WIDTH> q;
  SwizzledTile<Element, COLS, DEPTH, WIDTH> k, v;
};

/// O = softmax(Q Kᵀ) V for 128 queries, 64 of each warpgroup, and `tiles` tiles of COLS keys. While a warpgroup takes
/// the softmax of one tile it multiplies the last one's P V.
KERNEL(256, 1) attention(const Element* g_q, const Element* g_k, const Element* g_v, Element* g_o, int tiles, float sigma2) {
  AttentionSmem& s = dynamic_smem<AttentionSmem>();
  const int row0 = warpgroup_id() * 64;
  load_tile<256>(s.q, g_q);
  WarpgroupAccumulator<64, DEPTH> r_o;
  WarpgroupAccumulator<64, COLS> r_s;
  WarpgroupFragments<64, COLS> r_p;
  Softmax<MMA_M> softmax;
  r_o.clear();
  for (int tile = 0; tile < tiles; ++tile) {
    load_tile<256>(s.k, g_k + tile * COLS * DEPTH);
    load_tile<256>(s.v, g_v + tile * COLS * DEPTH);
    fence_proxy_async();
    block_sync();
    wgmma_fence(r_s);
    wgmma_abt<Element>(r_s, s.q, row0, s.k, false);
    wgmma_commit();
    wgmma_wait<0>(r_s);
    softmax.update(r_s, r_o, sigma2);
    r_p.template round<Element>(r_s);
    wgmma_fence(r_o, r_p);
    wgmma_ab<Element>(r_o, r_p, s.v, true);
    wgmma_commit();
    wgmma_wait<0>(r_o, r_p);
    block_sync();
  }
  softmax.finish();
  softmax.normalise(r_o);
  store_rows(g_o + row0 * DEPTH, DEPTH, r_o, 64, DEPTH);
}

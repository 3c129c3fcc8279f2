// Tiles as kernels multiply them: A Bᵀ, and attention with P in registers, fed by plain stores. Runs on both
// machines.
#include "prim/acc.cuh"
#include "prim/softmax.cuh"
#include "prim/stmatrix.cuh"
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

/// D = A Bᵀ for ROWS rows of A and COLS rows of B, added up `times` times with two groups under way.
KERNEL(128, 1) gemm(const Element* g_a, const Element* g_b, float* g_d, int times) {
  GemmSmem& s = dynamic_smem<GemmSmem>();
  load_tile<128>(s.a, g_a);
  load_tile<128>(s.b, g_b);
  fence_proxy_async();
  block_sync();
  WarpgroupAccumulator<ROWS, COLS> acc;
  wgmma_fence(acc);
  for (int i = 0; i < times; ++i) {
    wgmma_abt<Element>(acc, s.a, 0, s.b, i > 0);
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>(acc);
  store_rows(g_d, COLS, acc, ROWS, COLS);
}

struct AttentionSmem {
  SwizzledTile<Element, 128, DEPTH, WIDTH> q;
  SwizzledTile<Element, COLS, DEPTH, WIDTH> k, v;
};

/// O = softmax(Q Kᵀ) V for 128 queries, 64 of each warpgroup, and `tiles` tiles of COLS keys.
KERNEL(256, 1)
attention(const Element* g_q, const Element* g_k, const Element* g_v, Element* g_o, int tiles, float sigma2) {
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

/// The same, with P V under way while the softmax of the next tile is taken; all tiles lie in shared memory,
/// and O leaves through it, by stmatrix.
struct OverlappedSmem {
  SwizzledTile<Element, 128, DEPTH, WIDTH> q;
  SwizzledTile<Element, COLS, DEPTH, WIDTH> k[2], v[2];
};
KERNEL(256, 1)
overlapped(const Element* g_q, const Element* g_k, const Element* g_v, Element* g_o, float sigma2) {
  OverlappedSmem& s = dynamic_smem<OverlappedSmem>();
  const int row0 = warpgroup_id() * 64;
  load_tile<256>(s.q, g_q);
  for (int i = 0; i < 2; ++i) {
    load_tile<256>(s.k[i], g_k + i * COLS * DEPTH);
    load_tile<256>(s.v[i], g_v + i * COLS * DEPTH);
  }
  fence_proxy_async();
  block_sync();
  WarpgroupAccumulator<64, DEPTH> r_o;
  WarpgroupAccumulator<64, COLS> r_s;
  WarpgroupFragments<64, COLS> r_p;
  WarpgroupAccumulator<64, 8> r_none;  // what update() has nothing to rescale in
  Softmax<MMA_M> softmax, before;
  wgmma_fence(r_s);
  wgmma_abt<Element>(r_s, s.q, row0, s.k[0], false);
  wgmma_commit();
  wgmma_wait<0>(r_s);
  r_none.clear();
  softmax.update(r_s, r_none, sigma2);
  r_p.template round<Element>(r_s);

  wgmma_fence(r_s, r_p);
  wgmma_abt<Element>(r_s, s.q, row0, s.k[1], false);
  wgmma_commit();
  wgmma_ab<Element>(r_o, r_p, s.v[0], false);
  wgmma_commit();
  wgmma_wait<1>(r_s);
  before = softmax;
  softmax.update(r_s, r_none, sigma2);
  wgmma_wait<0>(r_o, r_p);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float rescale = SoftmaxRow(before.row[0][half]).raise(softmax.row[0][half].m, sigma2);
#pragma unroll
    for (int n = 0; n < DEPTH / 8; ++n)
      r_o.tile[0][n][2 * half] *= rescale, r_o.tile[0][n][2 * half + 1] *= rescale;
  }
  r_p.template round<Element>(r_s);
  wgmma_fence(r_o, r_p);
  wgmma_ab<Element>(r_o, r_p, s.v[1], true);
  wgmma_commit();
  wgmma_wait<0>(r_o, r_p);
  softmax.finish();
  softmax.normalise(r_o);

  // Each warp writes its 16 rows where its warpgroup alone has read: four matrices are 16 rows of 16 columns.
  const int row = row0 + warp_in_group() * 16 + lane_id() % 16;
  named_sync(1 + warpgroup_id(), WARPGROUP);
#pragma unroll
  for (int n = 0; n < DEPTH / 8; n += 2) {
    const float (&left)[4] = r_o.tile[0][n], (&right)[4] = r_o.tile[0][n + 1];
    const uint32_t r[4] = {pack2<Element>(left[0], left[1]), pack2<Element>(left[2], left[3]),
                           pack2<Element>(right[0], right[1]), pack2<Element>(right[2], right[3])};
    stmatrix_x4(s.q.at(row, n * 8 + lane_id() / 16 * 8), r);
  }
  warp_sync();
  for (int i = lane_id(); i < 16 * DEPTH / 8; i += 32) {
    const int from = row0 + warp_in_group() * 16 + i / (DEPTH / 8), col = i % (DEPTH / 8) * 8;
    store_global(reinterpret_cast<Vec16*>(g_o + from * DEPTH + col),
                 load_shared(reinterpret_cast<const Vec16*>(s.q.at(from, col))));
  }
}

// standard: attention as the formula says it, in three launches with the whole score matrix in global memory.
//
//   scores    S = σ Q Kᵀ, masked scores −∞              grid (ceil(N / BLOCK), ceil(M / BLOCK), heads)
//   softmax   P = e^{S − LSE}, LSE = ln Σ e^S           grid (M, heads)
//   output    O = P V                                   grid (ceil(M / BLOCK), 1, heads)
//
// COLS    N rounded up to 8, so that rows of P are aligned; the columns past N hold −∞ and 0
// heads   the heads of one pass, `head0`… of B·H; the scratch for S and P holds that many
// block   `scores`: WARPS_M × WARPS_N warps, each with a part of the tile; `softmax`: one row; `output`: 16
//         rows a warp
// bytes   S is written once and read twice, P written and read once: per head (3·sizeof(Score) +
//         2·sizeof(Element))·M·N, where Q, K, V and O together are only 2·(M + N)·D elements. This is the
//         traffic that every other kernel avoids.
#include "prim/mask.cuh"
#include "prim/softmax.cuh"
#include "prim/tile.cuh"

constexpr int D_PAD = round_up(HEAD_DIM, MMA_K), KEY_STEP = 64;
constexpr int WARPS_M = 4, WARPS_N = 2, THREADS = WARPS_M * WARPS_N * WARP,
              OUTPUT_THREADS = BLOCK / MMA_M * WARP;

struct ScoresSmem {
  SmemTile<Element, BLOCK, D_PAD> q;
  SmemTile<Element, BLOCK / WARPS_N, D_PAD> k[WARPS_N];
};
struct SoftmaxSmem {
  float m[THREADS / WARP], l[THREADS / WARP];
};
struct OutputSmem {
  SmemTile<Element, BLOCK, KEY_STEP> p[2];
  SmemTile<Element, KEY_STEP, D_PAD> v[2];
};
static_assert(sizeof(ScoresSmem) == SCORES_SMEM_BYTES && sizeof(SoftmaxSmem) == SOFTMAX_SMEM_BYTES &&
                  sizeof(OutputSmem) == OUTPUT_SMEM_BYTES,
              "the plan's shared memory must be these structs");

KERNEL(THREADS, 1)
standard_scores(const View<const Element, 4> g_q, const View<const Element, 4> g_k, const View<Score, 3> g_s,
                int head0, int M, int N, int COLS, int H, int GROUP, float sigma) {
  ScoresSmem& s = dynamic_smem<ScoresSmem>();
  const int key0 = blockIdx.x * BLOCK, m0 = blockIdx.y * BLOCK, head = head0 + blockIdx.z, b = head / H,
            h = head % H;
  const int part = warp_id() % WARPS_N, warp_row = warp_id() / WARPS_N * (BLOCK / WARPS_M),
            keys = BLOCK / WARPS_N;

  load_tile_async<THREADS>(s.q, g_q.at(b, m0, h), g_q.stride[1], M - m0, HEAD_DIM, threadIdx.x);
#pragma unroll
  for (int i = 0; i < WARPS_N; ++i)
    load_tile_async<THREADS>(s.k[i], g_k.at(b, key0 + i * keys, h / GROUP), g_k.stride[1],
                             N - key0 - i * keys, HEAD_DIM, threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  block_sync();

  Accumulator<BLOCK / WARPS_M, BLOCK / WARPS_N> r_s;
  r_s.clear();
  multiply_abt<Element>(r_s, s.q, warp_row, s.k[part]);
#pragma unroll
  for (int m = 0; m < r_s.M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < r_s.N_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) r_s.tile[m][n][e] *= sigma;
  mask_scores(r_s, CAUSAL, m0 + warp_row, key0 + part * keys, M, N);

#pragma unroll
  for (int m = 0; m < r_s.M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < r_s.N_TILES; ++n) {
        int row = m0 + warp_row + r_s.row(m, half), col = key0 + part * keys + r_s.col(n, 0);
        if (row < M && col < COLS)
          store_pair(g_s.at(blockIdx.z, row) + col, r_s.tile[m][n][2 * half], r_s.tile[m][n][2 * half + 1]);
      }
}

KERNEL(THREADS, 1)
standard_softmax(const View<const Score, 3> g_s, const View<Element, 3> g_p, const View<float, 3> g_lse,
                 int head0, int COLS, int H) {
  SoftmaxSmem& s = dynamic_smem<SoftmaxSmem>();
  const int row = blockIdx.x, head = head0 + blockIdx.y;
  const Score* g_row = g_s.at(blockIdx.y, row);
  constexpr float ONE = LOG2_E;  // the scores are scaled already

  SoftmaxRow stats;
  for (int col = 2 * threadIdx.x; col < COLS; col += 2 * THREADS) {
    Pair x = load_pair(g_row + col);
    stats.raise(fmaxf(x.a, x.b), ONE);
    stats.l += stats.weight(x.a, ONE) + stats.weight(x.b, ONE);
  }
  stats = merge_lanes(stats, ONE);
  if (lane_id() == 0) store_shared(&s.m[warp_id()], stats.m), store_shared(&s.l[warp_id()], stats.l);
  block_sync();
  stats = SoftmaxRow();
#pragma unroll
  for (int w = 0; w < THREADS / WARP; ++w) stats.merge({load_shared(&s.m[w]), load_shared(&s.l[w])}, ONE);

  const float inverse = stats.inverse_sum();
  Element* g_out = g_p.at(blockIdx.y, row);
  for (int col = 2 * threadIdx.x; col < COLS; col += 2 * THREADS) {
    Pair x = load_pair(g_row + col);
    store_pair(g_out + col, stats.weight(x.a, ONE) * inverse, stats.weight(x.b, ONE) * inverse);
  }
  if (threadIdx.x == 0) store_global(g_lse.at(head / H, head % H) + row, stats.lse(1.f));
}

/// Starts loading keys key0… of P and of V.
DEVICE void load_step(OutputSmem& s, int stage, const View<const Element, 3>& g_p,
                      const View<const Element, 4>& g_v, int m0, int key0, int b, int hkv, int M, int N,
                      int COLS SITE) {
  load_tile_async<OUTPUT_THREADS>(s.p[stage], g_p.at(blockIdx.z, m0) + key0, g_p.stride[1], M - m0,
                                  COLS - key0, threadIdx.x AT_SITE);
  load_tile_async<OUTPUT_THREADS>(s.v[stage], g_v.at(b, key0, hkv), g_v.stride[1], N - key0, HEAD_DIM,
                                  threadIdx.x AT_SITE);
  cp_async_commit(ONLY_AT_SITE);
}

KERNEL(OUTPUT_THREADS, 1)
standard_output(const View<const Element, 3> g_p, const View<const Element, 4> g_v,
                const View<Element, 4> g_o, int head0, int M, int N, int COLS, int H, int GROUP) {
  OutputSmem& s = dynamic_smem<OutputSmem>();
  const int m0 = blockIdx.x * BLOCK, head = head0 + blockIdx.z, b = head / H, h = head % H,
            warp_row = warp_id() * MMA_M;
  const int steps = ceil_div(N, KEY_STEP);

  Accumulator<MMA_M, D_PAD> r_o;
  r_o.clear();
  if (steps > 0) load_step(s, 0, g_p, g_v, m0, 0, b, h / GROUP, M, N, COLS);
#pragma unroll 1
  for (int j = 0; j < steps; ++j) {
    cp_async_wait<0>();
    block_sync();
    if (j + 1 < steps) load_step(s, (j + 1) % 2, g_p, g_v, m0, (j + 1) * KEY_STEP, b, h / GROUP, M, N, COLS);
    multiply_ab<Element>(r_o, s.p[j % 2], warp_row, s.v[j % 2]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < r_o.N_TILES; ++n) {
      int row = m0 + warp_row + r_o.row(0, half), col = r_o.col(n, 0);
      if (row < M && col < HEAD_DIM)
        store_pair(g_o.at(b, row, h) + col, r_o.tile[0][n][2 * half], r_o.tile[0][n][2 * half + 1]);
    }
}

// combine: merges the partial results of S splits of the keys, in split order.
//
//   LSE = ln Σ_s e^{LSE_s}        O = Σ_s e^{LSE_s − LSE} O_s
//
// grid    (H, B, M); the parts of a sequence lie split after split, of each the M queries
// block   one thread a pair of columns
// bytes   every partial LSE, and every partial O whose split has keys (LSE_s > −∞), once; O and LSE once
#include "prim/gmem.cuh"
#include "prim/softmax.cuh"

constexpr int THREADS = round_up(HEAD_DIM / 2, WARP);

KERNEL(THREADS, 1)
combine(const View<const Partial, 4> g_part, const View<const float, 3> g_part_lse,
        const View<Element, 4> g_o, const View<float, 3> g_lse, int SPLITS) {
  const int h = blockIdx.x, b = blockIdx.y, m = M == 1 ? 0 : blockIdx.z, col = threadIdx.x * 2;
  if (col >= HEAD_DIM) return;

  SoftmaxRow whole;
  Pair o{0.f, 0.f};
  for (int split = 0; split < SPLITS; ++split) {
    float lse = load_global(g_part_lse.at(b, h) + split * M + m);
    if (lse == -INFINITY) continue;
    Pair part = load_pair(g_part.at(b, split * M + m, h) + col);
    auto factor = whole.merge({lse, 1.f}, LOG2_E);
    o.a = o.a * factor.mine + part.a * factor.theirs;
    o.b = o.b * factor.mine + part.b * factor.theirs;
  }
  const float inverse = whole.inverse_sum();
  store_pair(g_o.at(b, m, h) + col, o.a * inverse, o.b * inverse);
  if (col == 0) store_global(g_lse.at(b, h) + m, whole.lse(1.f));
}

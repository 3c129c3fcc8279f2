// scan: what a warp's lanes sum and compare (prim/scan.cuh), a value a thread.
#include "prim/gmem.cuh"
#include "prim/scan.cuh"

KERNEL(32, 1) scanned(const int* g_n, const float* g_x, int* g_sum, int* g_below, int* g_top, float* g_largest) {
  const int i = blockIdx.x * 32 + threadIdx.x, n = load_global(g_n + i);
  store_global(g_sum + i, warp_sum(n));
  store_global(g_below + i, warp_prefix(n));
  store_global(g_top + i, warp_max(n));
  store_global(g_largest + i, warp_max(load_global(g_x + i)));
}

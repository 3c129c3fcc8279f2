// copy_pages: copies whole pages of a paged cache, within its pool or into another.
//
//   to[dst[i], :, :, :] = from[src[i], :, :, :]        for i < n, of K and of V
//
// grid    (ceil(n / PAIRS), ceil(WORDS / (LANES · STEPS)))
// block   PAIRS pages of K and of V; a thread stays in one page of each and takes STEPS words of 16 bytes,
//         LANES apart. Small pages share a block; of large ones a multiprocessor has 128 KB in flight
// bytes   every page of K and of V read once and written once, two page numbers a thread
#include "prim/gmem.cuh"

constexpr int THREADS = 256, ROW = HKV * ROW_WORDS, WORDS = PAGE_SIZE * ROW;

/// An element, of which only the width matters.
struct Element {
  uint8_t byte[WIDTH];
};

KERNEL(THREADS, 4)
copy_pages(const View<const Element, 4> g_k, const View<const Element, 4> g_v, const int* g_src,
           const int* g_dst, const View<Element, 4> g_k_to, const View<Element, 4> g_v_to, int n) {
  const int pair = blockIdx.x * PAIRS + threadIdx.x / LANES;
  const int first = blockIdx.y * LANES * STEPS + threadIdx.x % LANES;
  if (threadIdx.x >= PAIRS * LANES || pair >= n) return;
  const int src = load_global(g_src + pair), dst = load_global(g_dst + pair);
  auto place = [](const auto& cache, int page, int word) {
    return cache.at(page, word / ROW, word % ROW / ROW_WORDS) + word % ROW_WORDS * (16 / WIDTH);
  };

  Vec16 r_k[STEPS], r_v[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {  // NOTE: all loads before any store, so that all are in flight
    const int word = first + i * LANES;
    if (word >= WORDS) break;
    r_k[i] = load_global(reinterpret_cast<const Vec16*>(place(g_k, src, word)));
    r_v[i] = load_global(reinterpret_cast<const Vec16*>(place(g_v, src, word)));
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int word = first + i * LANES;
    if (word >= WORDS) break;
    store_global(reinterpret_cast<Vec16*>(place(g_k_to, dst, word)), r_k[i]);
    store_global(reinterpret_cast<Vec16*>(place(g_v_to, dst, word)), r_v[i]);
  }
}

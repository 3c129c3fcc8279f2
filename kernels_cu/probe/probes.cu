// probes: what the device itself can do. Each is the least kernel that keeps one resource busy.
//
//   probe_read    reads `count` 16-byte words, UNROLL in flight a thread:  bytes / time is the read ceiling
//   probe_words   reads as much in `count` words of WIDTH bytes:           time says what wide loads bring
//   probe_copy    reads and writes them:                                   2 · bytes / time is the copy ceiling
//   probe_mma     STEPS · 8 independent mma.sync a warp:                   flops / time is the mma.sync ceiling
//   probe_empty   nothing:                                                 time is the launch floor
//
// grid    a few blocks of THREADS an SM, striding over the words
#include "prim/gmem.cuh"
#include "prim/mma.cuh"

/// BYTES in one load, as the uint32_t or uint16_t they hold.
template <int BYTES> struct alignas(BYTES) Word {
  uint32_t word[BYTES / 4];
};
template <> struct Word<2> {
  uint16_t word[1];
};

/// Exclusive or of the thread's share of `count` words, read by `load` with UNROLL in flight.
template <class T, class Load> DEVICE uint32_t fold(const T* g_from, int64_t count, Load load) {
  const int64_t stride = int64_t(gridDim.x) * THREADS;
  int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  uint32_t seen = 0;
  auto absorb = [&](const T& v) {
    for (uint32_t part : v.word) seen ^= part;
  };
  for (; i + (UNROLL - 1) * stride < count; i += UNROLL * stride) {
    T v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) v[u] = load(g_from + i + u * stride);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) absorb(v[u]);
  }
  for (; i < count; i += stride) absorb(load(g_from + i));
  return seen;
}

KERNEL(THREADS, 1)
probe_read(const Vec16* g_from, int64_t count, uint32_t* g_sink) {
  const uint32_t seen = fold(g_from, count, [](const Vec16* p) { return load_global_streaming(p); });
  store_global(g_sink + blockIdx.x * THREADS + threadIdx.x, seen);  // the result keeps the loads alive
}

KERNEL(THREADS, 1)
probe_words(const Word<WIDTH>* g_from, int64_t count, uint32_t* g_sink) {
  const uint32_t seen = fold(g_from, count, [](const Word<WIDTH>* p) { return load_global(p); });
  // The stride is even: all 2-byte words of an odd thread are high halves of 32 bits.
  const int shift = WIDTH == 2 && threadIdx.x % 2 ? 16 : 0;
  store_global(g_sink + blockIdx.x * THREADS + threadIdx.x, seen << shift);
}

KERNEL(THREADS, 1)
probe_copy(const Vec16* g_from, int64_t count, Vec16* g_to) {
  const int64_t stride = int64_t(gridDim.x) * THREADS;
  int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  for (; i + (UNROLL - 1) * stride < count; i += UNROLL * stride) {
    Vec16 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) v[u] = load_global_streaming(g_from + i + u * stride);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) store_global(g_to + i + u * stride, v[u]);
  }
  for (; i < count; i += stride) store_global(g_to + i, load_global_streaming(g_from + i));
}

KERNEL(THREADS, 1)
probe_mma(const uint32_t* g_from, float* g_sink, int STEPS) {
  constexpr int TILES = 8;
  uint32_t a[4], b[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = load_global(g_from + lane_id() * 6 + i);
#pragma unroll
  for (int i = 0; i < 2; ++i) b[i] = load_global(g_from + lane_id() * 6 + 4 + i);
  float d[TILES][4] = {};
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int t = 0; t < TILES; ++t) mma_16816<Element>(d[t], a, b);
  float sum = 0.f;
#pragma unroll
  for (int t = 0; t < TILES; ++t) sum += d[t][0] + d[t][1] + d[t][2] + d[t][3];
  store_global(g_sink + blockIdx.x * THREADS + threadIdx.x, sum);
}

KERNEL(THREADS, 1)
probe_empty() {}

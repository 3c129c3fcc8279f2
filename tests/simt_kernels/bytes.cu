// bytes: numbers of eight bits as float16 and from float32 (prim/byte.cuh), a word of four a thread.
#include "prim/byte.cuh"
#include "prim/gmem.cuh"

KERNEL(32, 1) widened(const uint32_t* g_in, uint32_t* g_out, uint32_t* g_across) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  const uint32_t four = load_global(g_in + i);
  uint32_t halves[2], across[2];
  widen<Stored, false>(halves, four);
  widen<Stored, true>(across, four);
  for (int j = 0; j < 2; ++j) {
    store_global(g_out + 2 * i + j, halves[j]);
    store_global(g_across + 2 * i + j, across[j]);
  }
}

KERNEL(32, 1) narrowed(const float* g_in, uint32_t* g_out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  const auto x = [&](int j) { return load_global(g_in + 4 * i + j); };
  store_global(g_out + i, narrow<Stored>(x(0), x(1), x(2), x(3)));
}

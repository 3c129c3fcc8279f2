// What threads say to each other, and what the machine counts of it.
#include "prim/cp_async.cuh"
#include "prim/gmem.cuh"
#include "prim/mma.cuh"

/// Shuffles of several kinds and widths; out[kind][thread].
KERNEL(64, 1) shuffles(const float* g_in, float* g_out, int* g_votes) {
  int t = threadIdx.x, lane = lane_id();
  float v = load_global(g_in + t);
  store_global(g_out + t, shuffle(v, (lane + 5) % 32));
  store_global(g_out + 64 + t, shuffle_xor(v, 3));
  store_global(g_out + 128 + t, __shfl_down_sync(ALL_LANES, v, 7));
  store_global(g_out + 192 + t, __shfl_up_sync(ALL_LANES, v, 7));
  double wide = double(v) + 1e-12;
  store_global(g_out + 256 + t, float((shuffle_xor(wide, 1) - 1e-12)));
  store_global(g_votes + t, int(__ballot_sync(ALL_LANES, v > 0.f)));
}

/// Halves of a warp meet separately, a different number of times; odd lanes then leave early.
KERNEL(64, 1) masked(int* g_out) {
  int t = threadIdx.x, lane = lane_id(), v = lane;
  if (lane < 16)
    for (int i = 0; i < 3; ++i) v += __shfl_xor_sync(0x0000ffffu, v, 8);
  else
    for (int i = 0; i < 5; ++i) v += __shfl_xor_sync(0xffff0000u, v, 4);
  warp_sync();
  if (lane % 2) return store_global(g_out + t, v);
  unsigned upper = __ballot_sync(0x55555555u, lane >= 16);
  block_sync();  // half of the threads have left
  store_global(g_out + t, v + (upper == 0x55550000u ? 0 : 1000000));
}

struct Tiles {
  alignas(16) uint16_t a[16][16], b[8][16], c[16][8];
};

/// One product of 16 × 16 by 16 × 8, b stored [n][k]; and the same with b stored [k][n] through the
/// transposing load.
KERNEL(32, 1)
product(const Element* g_a, const Element* g_bt, const Element* g_b, const float* g_c, float* g_d) {
  Tiles& s = dynamic_smem<Tiles>();
  int lane = lane_id();
  for (int i = lane; i < 256; i += 32) store_shared(&s.a[0][0] + i, load_global(&g_a->bits + i));
  for (int i = lane; i < 128; i += 32) {
    store_shared(&s.b[0][0] + i, load_global(&g_bt->bits + i));
    store_shared(&s.c[0][0] + i, load_global(&g_b->bits + i));
  }
  warp_sync();
  uint32_t a[4], b[2], bt[2];
  ldmatrix_x4(a, &s.a[lane % 16][lane / 16 * 8]);
  simt::ldmatrix(b, 2, false, &s.b[lane % 8][lane / 8 % 2 * 8]);
  simt::ldmatrix(bt, 2, true, &s.c[lane % 16][0]);
  float d[2][4];
  for (int e = 0; e < 4; ++e)
    d[0][e] = d[1][e] = load_global(g_c + (lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2);
  mma_16816<Element>(d[0], a, b);
  mma_16816<Element>(d[1], a, bt);
  for (int i = 0; i < 2; ++i)
    for (int e = 0; e < 4; ++e)
      store_global(g_d + i * 128 + (lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2, d[i][e]);
}

struct Slots {
  int value[2][32];
};

/// Warp 0 produces into two slots, warp 1 consumes, with two barriers a slot.
KERNEL(64, 1) pipeline(const int* g_in, int* g_out, int steps) {
  Slots& s = dynamic_smem<Slots>();
  int lane = lane_id();
  for (int i = 0; i < steps; ++i) {
    int slot = i % 2, full = 1 + slot, empty = 3 + slot;
    if (warp_id() == 0) {
      if (i >= 2) named_sync(empty, 64);
      store_shared(&s.value[slot][lane], load_global(g_in + i * 32 + lane));
      named_arrive(full, 64);
    } else {
      named_sync(full, 64);
      store_global(g_out + i * 32 + lane, load_shared(&s.value[slot][31 - lane]));
      if (i + 2 < steps) named_arrive(empty, 64);
    }
  }
}

/// A histogram, a maximum, and the last arriver of the grid.
KERNEL(64, 1)
atomics(const int* g_in, int* g_count, int* g_max, float* g_sum, unsigned* g_ticket, int* g_last) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, v = load_global(g_in + i);
  simt::atomic_add(g_count + v % 8, 1);
  simt::atomic_max(g_max, v);
  simt::atomic_add(g_sum, 1.f);
  simt::fence();
  if (threadIdx.x == 0 && simt::atomic_add(g_ticket, 1u) == gridDim.x - 1)
    store_global(g_last, 7);
}

/// Copies 16 bytes a thread through shared memory; threads from `rows` on read nothing and get zero.
KERNEL(64, 1) staged(const Vec16* g_in, Vec16* g_out, int rows) {
  Vec16* s = static_cast<Vec16*>(simt::shared_base());
  int t = threadIdx.x;
  cp_async16(s + t, g_in + t, t < rows);
  cp_async_commit();
  cp_async_wait<0>();
  block_sync();
  store_global(g_out + t, load_shared(s + 63 - t));
}

/// Where every thread is: block (x, y, z) and thread, as one number.
KERNEL(32, 1) coordinates(int* g_out, int64_t far) {
  int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  store_global(g_out + block * far + threadIdx.x, block * 1000 + int(threadIdx.x));
}

/// Denormals are flushed, products are not fused, and a NaN loses against a number.
KERNEL(32, 1) arithmetic(const float* g_in, float* g_out) {
  float a = load_global(g_in), b = load_global(g_in + 1), c = load_global(g_in + 2);
  if (threadIdx.x) return;
  store_global(g_out, a * b + c);
  store_global(g_out + 1, load_global(g_in + 3) * 0.5f);
  store_global(g_out + 2, fmaxf(NAN, a));
  store_global(g_out + 3, fminf(a, NAN));
}

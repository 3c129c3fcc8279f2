// stmatrix, the six of them, elect and setmaxnreg. Runs on both machines.
#include "prim/gmem.cuh"
#include "prim/mma.cuh"
#include "prim/stmatrix.cuh"
#include "prim/warpgroup.cuh"

/// Matrix i of a warp, as stored and as stored transposed; the matrices lie one behind the other.
template <int COUNT, class Store>
DEVICE void store_and_read(Store store, const uint32_t* g_in, Vec16* g_out) {
  Vec16* s = &dynamic_smem<Vec16>();
  const int lane = lane_id();
  uint32_t r[COUNT];
  for (int i = 0; i < COUNT; ++i) r[i] = load_global(g_in + i * 32 + lane);
  warp_sync();
  store(s + lane % (8 * COUNT), r);
  warp_sync();
  if (lane < 8 * COUNT) store_global(g_out + lane, load_shared(s + lane));
}

KERNEL(32, 1) all_of_them(const uint32_t* g_in, Vec16* g_out) {
  store_and_read<1>([](Vec16* s, uint32_t (&r)[1]) { stmatrix_x1(s, r); }, g_in, g_out);
  store_and_read<1>([](Vec16* s, uint32_t (&r)[1]) { stmatrix_x1_trans(s, r); }, g_in, g_out + 32);
  store_and_read<2>([](Vec16* s, uint32_t (&r)[2]) { stmatrix_x2(s, r); }, g_in, g_out + 64);
  store_and_read<2>([](Vec16* s, uint32_t (&r)[2]) { stmatrix_x2_trans(s, r); }, g_in, g_out + 96);
  store_and_read<4>([](Vec16* s, uint32_t (&r)[4]) { stmatrix_x4(s, r); }, g_in, g_out + 128);
  store_and_read<4>([](Vec16* s, uint32_t (&r)[4]) { stmatrix_x4_trans(s, r); }, g_in, g_out + 160);
}

KERNEL(128, 1) elected(int* g_count) {
  for (int i = 0; i < 3; ++i)
    if (elect_one()) store_global(g_count + i * 4 + warp_id(), 1 + lane_id());
}

/// One warpgroup gives its registers to the other two.
KERNEL(384, 1) registers(int* g_out) {
  if (warpgroup_id() == 0) {
    setmaxnreg_dec<24>();
  } else {
    setmaxnreg_inc<240>();
  }
  store_global(g_out + threadIdx.x, int(threadIdx.x));
}

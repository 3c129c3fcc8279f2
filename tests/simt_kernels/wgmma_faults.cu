// Planted faults of warpgroups: each kernel leaves out or adds one thing.
#include "prim/acc.cuh"
#include "prim/wgmma.cuh"

struct Smem {
  SwizzledTile<bfloat16, 64, 64> a, b;
};
using Acc = WarpgroupAccumulator<64, 64>;
using Fragments = WarpgroupFragments<64, 64>;

DEVICE void fill(Smem& s, float value SITE) {
  const Vec16 eight = {{pack2<bfloat16>(value, value), pack2<bfloat16>(value, value),
                        pack2<bfloat16>(value, value), pack2<bfloat16>(value, value)}};
  for (int i = threadIdx.x % 128; i < 512; i += 128) {
    store_shared(reinterpret_cast<Vec16*>(s.a.at(i / 8, i % 8 * 8)), eight AT_SITE);
    store_shared(reinterpret_cast<Vec16*>(s.b.at(i / 8, i % 8 * 8)), eight AT_SITE);
  }
}
DEVICE Smem& filled() {
  Smem& s = dynamic_smem<Smem>();
  if (warpgroup_id() == 0) fill(s, 1.f);
  fence_proxy_async();
  block_sync();
  return s;
}
/// One product from fence to wait.
DEVICE void multiply(Acc& acc, Smem& s SITE) {
  wgmma_fence(acc);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, false AT_SITE);
  wgmma_commit();
  wgmma_wait<0>(acc);
}

KERNEL(128, 1) no_proxy_fence(float* g_d) {
  Smem& s = dynamic_smem<Smem>();
  Acc acc;
  fill(s, 1.f);      // written, no_proxy_fence
  block_sync();      // fence_proxy_async() is missing before this line
  multiply(acc, s);  // read, no_proxy_fence
  store_rows(g_d, 64, acc, 64, 64);
}

KERNEL(128, 1) proxy_fence_too_late(float* g_d) {
  Smem& s = dynamic_smem<Smem>();
  Acc acc;
  if (warp_id() == 1) fence_proxy_async();
  fill(s, 1.f);  // written, proxy_fence_too_late
  if (warp_id() != 1) fence_proxy_async();
  block_sync();
  multiply(acc, s);  // read, proxy_fence_too_late
  store_rows(g_d, 64, acc, 64, 64);
}

KERNEL(128, 1) no_barrier(float* g_d) {
  Smem& s = dynamic_smem<Smem>();
  Acc acc;
  fill(s, 1.f);         // written, no_barrier
  fence_proxy_async();  // block_sync() is missing after this line
  multiply(acc, s);     // read, no_barrier
  store_rows(g_d, 64, acc, 64, 64);
}

KERNEL(128, 1) no_wait(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma_fence(acc);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, false);
  wgmma_commit();  // wgmma_wait<0>(acc) is missing after this line
  store_rows(g_d, 64, acc, 64, 64);
  wgmma_wait<0>(acc);
}

KERNEL(128, 1) too_few_waited_for(float* g_d) {
  Smem& s = filled();
  Acc first, second;
  wgmma_fence(first, second);
  wgmma_abt<bfloat16>(first, s.a, 0, s.b, false);
  wgmma_commit();
  wgmma_abt<bfloat16>(second, s.a, 0, s.b, false);
  wgmma_commit();
  wgmma_wait<1>(first);
  store_rows(g_d, 64, first, 64, 32);
  store_rows(g_d + 32, 64, second, 64, 32);  // but only the first is there
  wgmma_wait<0>(second);
}

KERNEL(128, 1) never_waited_for(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma_fence(acc);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, false);  // issued, never waited for
  wgmma_commit();
}

KERNEL(128, 1) not_committed(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma_fence(acc);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, false);  // issued, not committed
  wgmma_wait<0>(acc);
}

KERNEL(128, 1) wrong_swizzle(float* g_d) {
  Smem& s = filled();
  for (int i = threadIdx.x; i < 64 * 64; i += 128) {
    store_shared(&s.a.at(i / 64, i % 64)->bits, from_float<bfloat16>(float(i % 7)).bits);
    store_shared(&s.b.at(i / 64, i % 64)->bits, from_float<bfloat16>(float(i % 5)).bits);
  }
  fence_proxy_async();
  block_sync();
  Acc acc;
  wgmma_fence(acc);
  for (int k = 0; k < 64; k += 16)
    wgmma<bfloat16>(acc.tile[0], matrix_descriptor<SWIZZLE>(s.a.panel(0) + k, 16, 1024), s.b.k_major(0, k),
                    k > 0);
  wgmma_commit();
  wgmma_wait<0>(acc);
  store_rows(g_d, 64, acc, 64, 64);
}

KERNEL(128, 1) divergent(float* g_d) {
  Smem& s = filled();
  Acc acc;
  if (warp_id() < 2)
    multiply(acc, s);  // two warps
  else
    multiply(acc, s);  // the other two
}

KERNEL(128, 1) other_descriptor(float* g_d) {
  Smem& s = filled();
  Acc acc;
  const int k = threadIdx.x == 70 ? 16 : 0;
  wgmma_fence(acc);
  wgmma<bfloat16>(acc.tile[0], s.a.k_major(0, 0), s.b.k_major(0, k), false);  // one lane's
  wgmma_commit();
  wgmma_wait<0>(acc);
}

KERNEL(128, 1) other_groups(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma_fence(acc);
  for (int i = 0; i < 2; ++i) {
    wgmma<bfloat16>(acc.tile[0], s.a.k_major(0, 0), s.b.k_major(0, 0), i > 0);
    if (i == (threadIdx.x == 70)) wgmma_commit();  // one lane's group
  }
  wgmma_wait<0>(acc);
}

/// No fault: one warp waits for the product before the others reach their wait.
KERNEL(128, 1) warps_wait_apart(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma_fence(acc);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, false);
  wgmma_commit();
  if (warp_id() == 1) wgmma_wait<0>(acc);
  named_sync(1, 128);
  if (warp_id() != 1) wgmma_wait<0>(acc);
  store_rows(g_d, 64, acc, 64, 64);
}

KERNEL(128, 1) a_warp_is_missing(float* g_d) {
  Smem& s = filled();
  Acc acc;
  if (warp_id() != 2) multiply(acc, s);  // three warps
}

KERNEL(128, 1) a_warp_waits_elsewhere(float* g_d) {
  Smem& s = filled();
  Acc acc;
  if (warp_id() != 2) multiply(acc, s);  // three warps wait
  block_sync();                          // where the fourth is
}

KERNEL(128, 1) a_changed(float* g_d) {
  Smem& s = filled();
  Acc acc;
  Fragments r_a;
  acc.clear();
  r_a.round<bfloat16>(acc);
  wgmma_fence(acc, r_a);
  wgmma<bfloat16>(acc.tile[0], r_a.step[0][0], s.b.k_major(0, 0), true);  // takes fragments
  wgmma_commit();
  if (threadIdx.x == 77) r_a.step[0][0][2] += 1;
  wgmma_wait<0>(acc, r_a);
}

KERNEL(128, 1) accumulators_scaled(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma_fence(acc);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, false);  // issued, then scaled
  wgmma_commit();
  scale(acc, 2.f);
  wgmma_wait<0>(acc);
}

KERNEL(128, 1) no_wgmma_fence(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma<bfloat16>(acc.tile[0], s.a.k_major(0, 0), s.b.k_major(0, 0), false);  // not fenced
}

KERNEL(128, 1) no_second_wgmma_fence(float* g_d) {
  Smem& s = filled();
  Acc acc;
  multiply(acc, s);
  scale(acc, 2.f);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, true);  // not fenced again
}

KERNEL(128, 1) written_after_wgmma_fence(float* g_d) {
  Smem& s = filled();
  Acc acc;
  acc.clear();
  wgmma_fence(acc);
  acc.tile[0][3][1] += 1.f;
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, true);  // changed too late
}

KERNEL(128, 1) fragments_not_named(float* g_d) {
  Smem& s = filled();
  Acc acc;
  Fragments r_a;
  acc.clear();
  r_a.round<bfloat16>(acc);
  wgmma_fence(acc);
  wgmma_ab<bfloat16>(acc, r_a, s.b, true);  // fragments not named
}

KERNEL(128, 1) overwritten_before_the_wait(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma_fence(acc);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, false);  // reads the stage
  wgmma_commit();
  block_sync();
  fill(s, 2.f);  // refills it early
  wgmma_wait<0>(acc);
}

/// Warpgroup 1 fills again what warpgroup 0 multiplies, with or without a barrier behind its wait.
KERNEL(256, 1) refilled_by_others(float* g_d) {
  Smem& s = filled();
  Acc acc;
  if (warpgroup_id() == 0) {
    multiply(acc, s);  // reads for the others
    if (WITH_BARRIER) named_sync(1, 256);
  } else {
    if (WITH_BARRIER) named_sync(1, 256);
    fill(s, 2.f);  // refills for the others
  }
}

KERNEL(96, 1) not_whole(float* g_d) {
  Acc acc;
  wgmma_fence(acc);  // in three warps
}

KERNEL(128, 1) out_of_bounds(float* g_d) {
  Smem& s = filled();
  Acc acc;
  wgmma_fence(acc);
  wgmma<bfloat16>(acc.tile[0], s.a.k_major(0, 0), s.b.k_major(32, 0), false);  // 64 columns from 32 of 64 on
}

KERNEL(128, 1) other_shape_under_way(float* g_d) {
  Smem& s = filled();
  Acc acc;
  auto& half = *reinterpret_cast<float(*)[4][4]>(acc.tile[0]);
  wgmma_fence(acc);
  wgmma_abt<bfloat16>(acc, s.a, 0, s.b, false);  // 64 columns wide
  wgmma<bfloat16>(half, s.a.k_major(0, 0), s.b.k_major(0, 0), true);  // 32 wide
}

KERNEL(384, 1) too_many_registers(int* g_out) {
  if (warpgroup_id() == 0)
    setmaxnreg_dec<40>();
  else
    setmaxnreg_inc<240>();  // two of three
}

KERNEL(128, 1) odd_registers(int* g_out) { setmaxnreg_dec<100>(); }

KERNEL(384, 1) wrong_way(int* g_out) { setmaxnreg_dec<240>(); }

KERNEL(128, 1) half_a_warpgroup(int* g_out) {
  if (warp_id() < 2) setmaxnreg_dec<40>();  // two warps of four
}

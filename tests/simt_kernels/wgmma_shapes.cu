// Every form of wgmma in one width, for the assembler.
#include "prim/wgmma.cuh"

KERNEL(128, 1) forms(float* g_d) {
  Vec16* s = &dynamic_smem<Vec16>();
  const uint64_t a = matrix_descriptor<128>(s, 16, 1024), b = matrix_descriptor<128>(s + 1024, 16, 1024);
  WarpgroupAccumulator<64, N> acc;
  WarpgroupFragments<64, 32> r_a;
  WarpgroupAccumulator<64, 32> r_s;
  r_s.clear();
  r_a.round<float16>(r_s);
  wgmma_fence(acc, r_a);
  wgmma<float16>(acc.tile[0], a, b, false);
  wgmma<bfloat16>(acc.tile[0], a, b, true);
  wgmma<float16, Major::MN, Major::MN>(acc.tile[0], a, b, true);
  wgmma<bfloat16, Major::MN, Major::MN>(acc.tile[0], a, b, true);
  wgmma<float8_e4m3>(acc.tile[0], a, b, true);
  wgmma<float16>(acc.tile[0], r_a.step[0][0], b, true);
  wgmma<bfloat16>(acc.tile[0], r_a.step[0][1], b, true);
  wgmma<float16, Major::MN>(acc.tile[0], r_a.step[0][0], b, true);
  wgmma<bfloat16, Major::MN>(acc.tile[0], r_a.step[0][1], b, true);
  wgmma<float8_e4m3>(acc.tile[0], r_a.step[0][0], b, true);
  wgmma_commit();
  wgmma_wait<0>(acc, r_a);
  for (int n = 0; n < N / 8; ++n)
    for (int e = 0; e < 4; ++e) g_d[(n * 4 + e) * 128 + threadIdx.x] = acc.tile[0][n][e];
}

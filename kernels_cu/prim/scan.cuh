// scan: sums and the maximum over the lanes of a warp.
#pragma once
#include "prim/warp.cuh"

/// The sum over all lanes, in every lane. PTX redux.sync.add.s32 (sm_80).
DEVICE int warp_sum(int v SITE) {
#if defined(CUATTN_SIMT)
  for (int distance = WARP / 2; distance > 0; distance /= 2) v += shuffle_xor(v, distance AT_SITE);
  return v;
#else
  int sum;
  asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(v));
  return sum;
#endif
}

/// The largest of all lanes', in every lane. PTX redux.sync.max.s32 (sm_80).
DEVICE int warp_max(int v SITE) {
#if defined(CUATTN_SIMT)
  for (int distance = WARP / 2; distance > 0; distance /= 2) v = max(v, shuffle_xor(v, distance AT_SITE));
  return v;
#else
  int top;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(top) : "r"(v));
  return top;
#endif
}
/// NOTE: floats have the order of their bits, but for negative ones, which have the opposite one; a NaN is beyond all.
DEVICE float warp_max(float v SITE) {
  const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(ordered(warp_max(ordered(__float_as_int(v)) AT_SITE)));
}

/// The sum over this lane and those below it.
DEVICE int warp_prefix(int v SITE) {
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int below = shuffle(v, max(lane_id() - distance, 0) AT_SITE);
    if (lane_id() >= distance) v += below;
  }
  return v;
}

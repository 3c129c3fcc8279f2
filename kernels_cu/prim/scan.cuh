// scan: sums and the maximum over the lanes of a warp.
#pragma once
#include "prim/warp.cuh"

/// The sum over all lanes, in every lane.
DEVICE int warp_sum(int v SITE) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) v += shuffle_xor(v, distance AT_SITE);
  return v;
}

/// The largest of all lanes', in every lane.
DEVICE float warp_max(float v SITE) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) v = fmaxf(v, shuffle_xor(v, distance AT_SITE));
  return v;
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

// sink: one extra logit a head, which takes a share of every row's weights and has no value (Xiao et al.
// 2023; gpt-oss).
#pragma once
#include "prim/gmem.cuh"
#include "prim/softmax.cuh"

/// One number for all lanes of a warp, read once.
DEVICE float load_for_warp(const float* g SITE) {
  return shuffle(lane_id() == 0 ? load_global(g AT_SITE) : 0.f, 0 AT_SITE);
}

/// Lets every row begin with the sink, in units of σ s, as a key that it has seen.
/// NOTE: until `finish`, a lane's l is its part of the quad's, so one of the four counts the sink.
template <class Rows> DEVICE void begin_with_sink(Rows& softmax, const float* g_sink, float sigma SITE) {
  const SoftmaxRow sink(load_for_warp(g_sink AT_SITE) / sigma, lane_id() % 4 == 0 ? 1.f : 0.f);
#pragma unroll
  for (int m = 0; m < Rows::M_TILES; ++m) softmax.row[m][0] = softmax.row[m][1] = sink;
}

// packed: sequences of different lengths one behind the other in one array, and where each begins.
#pragma once
#include "prim/gmem.cuh"
#include "prim/warp.cuh"

/// Sequence i: M queries from row q0 on and N keys from row k0 on, of index b of their arrays.
struct Sequence {
  int i, b, q0, k0, M, N;
};

/// Sequence i of packed arrays: where it and the next one begin. All lanes of a warp call it, which reads
/// each number once.
DEVICE Sequence packed_sequence(const int* g_begin_q, const int* g_begin_k, int i SITE) {
  const int lane = lane_id(), *g = lane < 2 ? g_begin_q : g_begin_k;
  const int begin = lane < 4 ? load_global(g + i + lane % 2 AT_SITE) : 0;
  const int q0 = shuffle(begin, 0 AT_SITE), q1 = shuffle(begin, 1 AT_SITE);
  const int k0 = shuffle(begin, 2 AT_SITE), k1 = shuffle(begin, 3 AT_SITE);
  return {i, 0, q0, k0, q1 - q0, k1 - k0};
}

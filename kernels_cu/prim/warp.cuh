// warp: what threads of a warp, or of a block, say to each other.
#pragma once
#include "prim/arch.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

DEVICE int lane_id() { return int(threadIdx.x) % WARP; }
DEVICE int warp_id() { return int(threadIdx.x) / WARP; }

template <class T> DEVICE T shuffle(T v, int source_lane SITE) {
#if defined(CUATTN_SIMT)
  return simt::shfl(ALL_LANES, v, source_lane AT_SITE);
#else
  return __shfl_sync(ALL_LANES, v, source_lane);
#endif
}

template <class T> DEVICE T shuffle_xor(T v, int lane_mask SITE) {
#if defined(CUATTN_SIMT)
  return simt::shfl_xor(ALL_LANES, v, lane_mask AT_SITE);
#else
  return __shfl_xor_sync(ALL_LANES, v, lane_mask);
#endif
}

/// Whether `p` holds in a lane of the warp.
DEVICE bool warp_any(bool p SITE) {
#if defined(CUATTN_SIMT)
  return simt::ballot(ALL_LANES, p AT_SITE) != 0;
#else
  return __any_sync(ALL_LANES, p);
#endif
}

/// Orders shared memory among the lanes of a warp.
DEVICE void warp_sync(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::syncwarp(ALL_LANES AT_SITE);
#else
  __syncwarp();
#endif
}

/// Orders shared memory among all threads of the block.
DEVICE void block_sync(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::block_barrier(ONLY_AT_SITE);
#else
  __syncthreads();
#endif
}

/// Barrier `id` (1…15) among `threads` threads. PTX bar.sync.
DEVICE void named_sync(int id, int threads SITE) {
#if defined(CUATTN_SIMT)
  simt::named_barrier_sync(id, threads AT_SITE);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

/// Arrives at barrier `id` without waiting. PTX bar.arrive.
DEVICE void named_arrive(int id, int threads SITE) {
#if defined(CUATTN_SIMT)
  simt::named_barrier_arrive(id, threads AT_SITE);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

/// The four lanes of a quad hold one row of an mma accumulator.
DEVICE float quad_max(float v SITE) {
  v = fmaxf(v, shuffle_xor(v, 1 AT_SITE));
  return fmaxf(v, shuffle_xor(v, 2 AT_SITE));
}
DEVICE float quad_sum(float v SITE) {
  v += shuffle_xor(v, 1 AT_SITE);
  return v + shuffle_xor(v, 2 AT_SITE);
}

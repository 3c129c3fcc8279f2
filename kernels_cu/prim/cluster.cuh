// cluster: neighbouring blocks that run at the same time and reach each other's barriers (sm_90). The launch
// says how many.
#pragma once
#include "prim/mbarrier.cuh"

/// This block's number in its cluster. PTX %cluster_ctarank.
DEVICE uint32_t cluster_rank() {
#if defined(CUATTN_SIMT)
  return simt::machine.block->rank;
#else
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}

/// Blocks of a cluster. PTX %cluster_nctarank.
DEVICE uint32_t cluster_size() {
#if defined(CUATTN_SIMT)
  return simt::machine.launch.cluster;
#else
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
#endif
}

/// Arrives at the cluster's barrier, as every thread of its blocks does. PTX barrier.cluster.arrive.
/// NOTE: not its .aligned form, which a warp that has diverged must not execute.
DEVICE void cluster_arrive(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::cluster_arrive(ONLY_AT_SITE);
#else
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

/// Waits for all threads of the cluster to arrive. PTX barrier.cluster.wait.
DEVICE void cluster_wait(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::cluster_wait(ONLY_AT_SITE);
#else
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

DEVICE void cluster_sync(SITE_ONLY) {
  cluster_arrive(ONLY_AT_SITE);
  cluster_wait(ONLY_AT_SITE);
}

/// Arrives at the mbarrier at the same place of block `rank`'s shared memory. PTX mapa, mbarrier.arrive.
DEVICE void mbarrier_arrive_remote(Mbarrier& s_bar, uint32_t rank SITE) {
#if defined(CUATTN_SIMT)
  simt::mbarrier_arrive_remote(&s_bar, rank AT_SITE);
#else
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(&s_bar)),
      "r"(rank)
      : "memory");
#endif
}

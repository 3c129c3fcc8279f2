// cluster: blocks that run together (sm_90), their barrier, and arrivals at each other's mbarriers.
#pragma once
#include "mbarrier.h"

namespace simt {

/// barrier.cluster: every thread of the cluster that has not left arrives, and waits for the others later.
struct ClusterBarrier {
  int blocks, arrived;
  uint32_t phase;
  uint32_t* phases;         // of each thread: 1 + the phase it has arrived in and not waited for; 0: none
  Site* sites;              // where it arrived or waits
  uint32_t* waiting_slots;  // of each warp
  Known arriving, over;
};

/// Gives a block the barrier of its cluster, which the first block makes.
SIMT_COLD void make_cluster(Block& block);
void free_cluster(Block& block);

void cluster_arrive(Site site = Site::here());

void cluster_wait(Site site = Site::here());

/// Another block of the running one's cluster, which must not have left.
Block& block_of_rank(uint32_t rank, Site site);

/// Arrives at the mbarrier at this place of another block's shared memory.
void mbarrier_arrive_remote(void* s_bar, uint32_t rank, Site site = Site::here());

}  // namespace simt

// wgmma: products of a warpgroup, whose operands lie in shared memory and whose accumulators are its
// registers.
//
// A thread leaves its part of a wgmma and goes on; the 128th makes it complete. Tensor cores read shared memory
// by the async proxy: late, when the first thread waits for them, or eagerly, at once. From its part on a
// thread's accumulators hold poison, until it has waited. So a missing wait shows as NaN, a stage that is filled
// too early as other numbers, and registers that change in between are found at the wait. Threads of a
// warpgroup must make the same calls in the same order; whoever comes first says what the others must bring.
#pragma once
#include "warpgroup_calls.h"

namespace simt {

/// wgmma.mma_async: d (64 × n, of which a thread holds n / 2) += or = a b.
void wgmma(const WgmmaCall& call, float* d, const uint32_t* a, Site site);

/// wgmma.fence: what the named registers hold now is what wgmma may take.
void wgmma_fence(const Registers* registers, int count, Site site = Site::here());

/// wgmma.commit_group: closes the group of wgmmas since the last commit.
void wgmma_commit(Site site = Site::here());

/// wgmma.wait_group: until at most `allow` groups are under way.
void wgmma_wait(int allow, Site site = Site::here());

}  // namespace simt

// block: which thread runs next, block-wide and named barriers, exits, deadlocks.
#pragma once
#include "warpgroup.h"

namespace simt {

constexpr uint32_t SLICE = 1u << 16;

SIMT_INLINE void run(Fiber* next) {
  Fiber* me = current;
  current = next;
  simt_fiber_switch(&me->stack_pointer, next->stack_pointer);
}

/// The next ready thread: later in this warp's order, else earlier in it, else of the warps that follow. Null
/// if none.
SIMT_INLINE Fiber* next_in_warp(Warp* warp, uint32_t slot_bit) {
  uint32_t later = warp->ready & ~((slot_bit << 1) - 1u);
  if (uint32_t from = later ? later : warp->ready) return warp->slots + __builtin_ctz(from);
  return nullptr;
}
SIMT_COLD Fiber* next_in_block(Warp* warp);

SIMT_COLD void say_mbarrier_waits(const Block& block, const Warp& warp);  // in mbarrier.cc
SIMT_COLD void say_cluster_waits(const Block& block, const Warp& warp);   // in cluster.cc
SIMT_COLD bool land_late_loads(Block& block);                             // in bulk.cc
SIMT_COLD void finish_async();                                            // in mbarrier.cc
SIMT_COLD void finish_in_cluster();                                       // in cluster.cc

SIMT_COLD void look_up();

/// Gives another block its turn, if several are in flight. `must`: the running one gets nowhere alone.
SIMT_COLD void yield_block(bool must);

/// No thread of the block can run: bulk copies land now, or the cluster's other blocks wake one.
SIMT_COLD Fiber* next_after_all();

/// Leaves the running thread, which waits, until something makes it ready again.
SIMT_CALL void wait();

SIMT_CALL void step();

SIMT_CALL void complete(Barrier& barrier, bool running_waits);

/// Arrives at a barrier and, unless `only_arrive`, waits there. `expected` 0 means all live threads of the
/// block.
SIMT_CALL void arrive(Barrier& barrier, int expected, bool only_arrive, Site site);

/// __syncthreads: all live threads of the block meet at one call site.
SIMT_CALL void block_barrier(Site site = Site::here());

SIMT_COLD Barrier& named_barrier(int id, int threads, Site site);
void named_barrier_sync(int id, int threads, Site site = Site::here());
void named_barrier_arrive(int id, int threads, Site site = Site::here());

/// The running thread has returned from the kernel. Barriers count live threads, so its exit may complete
/// one.
[[noreturn]] void retire();

}  // namespace simt

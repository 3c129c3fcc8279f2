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
SIMT_INLINE void wait() {
  if (--machine.slice == 0) [[unlikely]]
    look_up();
  Fiber* next = next_in_warp(current->warp, current->slot_bit);
  if (!next) [[unlikely]] {
    next = next_in_block(current->warp);
    if (!next) next = next_after_all();
    if (next == current) return;
  }
  run(next);
}

SIMT_INLINE void step() {
  if (--machine.slice == 0) [[unlikely]] {
    look_up();
    Warp* warp = current->warp;
    uint32_t later = warp->ready & ~((current->slot_bit << 1) - 1u);
    Fiber* next = later ? warp->slots + __builtin_ctz(later) : next_in_block(warp);
    if (next && next != current) run(next);
  }
}

SIMT_INLINE void complete(Barrier& barrier, bool running_waits) {
  if (machine.watched) [[unlikely]]
    watch_barrier(barrier, running_waits);
  for (int w = 0; w < machine.block->warps; ++w) {
    machine.block->warp[w].ready |= barrier.waiting_slots[w];
    barrier.waiting_slots[w] = 0;
  }
  barrier.arrived = 0;
  ++machine.counters.barriers;
}

/// Arrives at a barrier and, unless `only_arrive`, waits there. `expected` 0 means all live threads of the
/// block.
SIMT_INLINE void arrive(Barrier& barrier, int expected, bool only_arrive, Site site) {
  if (!barrier.arrived || !only_arrive) barrier.site = site;
  barrier.expected = expected;
  if (machine.watched) [[unlikely]]
    watch_arrival(barrier, site);
  if (++barrier.arrived == (expected ? expected : machine.block->live))
    return complete(barrier, !only_arrive);
  if (only_arrive) return;
  Warp* warp = current->warp;
  barrier.waiting_slots[warp - machine.block->warp] |= current->slot_bit;
  warp->ready &= ~current->slot_bit;
  wait();
}

/// __syncthreads: all live threads of the block meet at one call site.
SIMT_INLINE void block_barrier(Site site = Site::here()) {
  Barrier& barrier = machine.block->barrier[0];
  if (barrier.arrived && !(barrier.site == site)) [[unlikely]]
    fail(site, "divergent __syncthreads: %d threads wait in the one at %s:%d while another is reached",
         barrier.arrived, barrier.site.name(), barrier.site.line);
  arrive(barrier, 0, false, site);
}

SIMT_COLD Barrier& named_barrier(int id, int threads, Site site);
void named_barrier_sync(int id, int threads, Site site = Site::here());
void named_barrier_arrive(int id, int threads, Site site = Site::here());

/// The running thread has returned from the kernel. Barriers count live threads, so its exit may complete
/// one.
[[noreturn]] void retire();

}  // namespace simt

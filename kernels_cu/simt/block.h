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
SIMT_COLD Fiber* next_in_block(Warp* warp) {
  Block& block = *machine.block;
  int first = int(warp - block.warp);
  for (int i = 1; i <= block.warps; ++i) {
    Warp& other = block.warp[(first + i) % block.warps];
    if (other.ready) return other.slots + __builtin_ctz(other.ready);
  }
  return nullptr;
}

SIMT_COLD void say_mbarrier_waits(const Block& block, const Warp& warp);  // in mbarrier.h
SIMT_COLD void say_cluster_waits(const Block& block, const Warp& warp);   // in cluster.h
SIMT_COLD bool land_late_loads(Block& block);                             // in bulk.h
SIMT_COLD void finish_async();                                            // in mbarrier.h
SIMT_COLD void finish_in_cluster();                                       // in cluster.h

SIMT_COLD void say_waits(const Block& block) {
  for (int w = 0; w < block.warps; ++w) {
    const Warp& warp = block.warp[w];
    for (int i = 0; i < warp.open; ++i) {
      const Rendezvous& r = warp.rendezvous[i];
      say("\n  warp %d, lanes %08x wait at %s:%d in %s for lanes %08x", warp.id, r.arrived, r.site.name(),
          r.site.line, call_name(r.kind), r.mask & ~r.arrived);
    }
    for (int id = 0; id < BARRIERS; ++id) {
      const Barrier& barrier = block.barrier[id];
      uint32_t lanes = 0;
      for (uint32_t slots = barrier.waiting_slots[w]; slots; slots &= slots - 1)
        lanes |= 1u << warp.slots[__builtin_ctz(slots)].lane;
      if (!lanes) continue;
      say("\n  warp %d, lanes %08x wait at %s:%d in %s", warp.id, lanes, barrier.site.name(),
          barrier.site.line, id ? "named barrier" : "__syncthreads");
      if (id) say(" %d", id);
      say(", which has %d of %d threads", barrier.arrived, barrier.expected ? barrier.expected : block.live);
    }
    say_mbarrier_waits(block, warp);
    say_cluster_waits(block, warp);
  }
  say_warpgroups(block);
}

[[noreturn]] SIMT_COLD void report_deadlock() {
  const Block& block = *machine.block;
  const uint3& b = block.index;
  say("%s: deadlock in block (%u,%u,%u): every live thread waits", machine.launch.kernel, b.x, b.y, b.z);
  say_waits(block);
  for (int rank = 0; rank < machine.launch.cluster; ++rank) {
    const Block& other = (&block - block.rank)[rank];
    if (&other == &block || !other.live) continue;
    say("\n  and in block (%u,%u,%u) of its cluster:", other.index.x, other.index.y, other.index.z);
    say_waits(other);
  }
  give_up();
}

SIMT_COLD void look_up();

/// Gives another block its turn, if several are in flight. `must`: the running one gets nowhere alone.
SIMT_COLD void yield_block(bool must) {
  machine.turn_over = must;
  machine.block->resume = current;
  simt_fiber_switch(&current->stack_pointer, machine.main_stack_pointer);
}

inline bool can_run(const Block& block) {
  uint32_t ready = 0;
  for (int w = 0; block.live && w < block.warps; ++w) ready |= block.warp[w].ready;
  return ready;
}
/// No thread of the block can run: bulk copies land now, or the cluster's other blocks wake one.
SIMT_COLD Fiber* next_after_all() {
  Block& block = *machine.block;
  while (!can_run(block)) {
    if (land_late_loads(block)) continue;
    bool others = false;
    for (int rank = 0; rank < machine.launch.cluster; ++rank) {
      Block& other = (&block - block.rank)[rank];
      others |= can_run(other) || (other.live && land_late_loads(other));
    }
    if (!others) report_deadlock();
    yield_block(true);
  }
  return next_in_block(current->warp);
}

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

/// Every SLICE steps: enforces the step limit, and lets other threads run so that a thread may spin on its
/// own block.
SIMT_COLD void look_up() {
  machine.slice = SLICE;
  machine.block->steps += SLICE;
  if (machine.block->steps >= machine.launch.step_limit) {
    const uint3 &t = current->thread_idx, &b = machine.block->index;
    say("%s: block (%u,%u,%u) took more than %llu steps, last in thread (%u,%u,%u): ", machine.launch.kernel,
        b.x, b.y, b.z, static_cast<unsigned long long>(machine.launch.step_limit), t.x, t.y, t.z);
    say("probably a loop that waits for another block (blocks run one after another here); "
        "if the kernel is really that long, raise CUATTN_CPU_STEP_LIMIT");
    give_up();
  }
  land_late_loads(*machine.block);  // a thread may wait for one that waits for them, in a loop of its own
  if (machine.launch.resident > 1) yield_block(true);
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

SIMT_COLD Barrier& named_barrier(int id, int threads, Site site) {
  if (id < 1 || id >= BARRIERS) fail(site, "named barrier %d: expected an id from 1 to 15", id);
  if (threads <= 0 || threads % LANES || threads > machine.block->threads)
    fail(site, "named barrier %d for %d threads: expected a multiple of 32, at most the block's %d", id,
         threads, machine.block->threads);
  Barrier& barrier = machine.block->barrier[id];
  if (barrier.arrived && barrier.expected != threads)
    fail(site, "named barrier %d for %d threads, but %s:%d waits there for %d", id, threads,
         barrier.site.name(), barrier.site.line, barrier.expected);
  return barrier;
}
inline void named_barrier_sync(int id, int threads, Site site = Site::here()) {
  arrive(named_barrier(id, threads, site), threads, false, site);
}
inline void named_barrier_arrive(int id, int threads, Site site = Site::here()) {
  arrive(named_barrier(id, threads, site), threads, true, site);
}

/// The running thread has returned from the kernel. Barriers count live threads, so its exit may complete
/// one.
[[noreturn]] inline void retire() {
  Fiber* me = current;
  Warp* warp = me->warp;
  Block& block = *machine.block;
  if (me->copies.count)  // in late mode; on a GPU they may land where something else has come to lie
    fail(me->copies.items[0].site,
         "cp.async issued here was never waited for: commit its group, and wait before the thread ends");
  if (block.warpgroups) [[unlikely]]
    leave_warpgroup();
  warp->ready &= ~me->slot_bit;
  warp->live &= ~(1u << me->lane);
  --block.live;
  if (block.async) [[unlikely]]
    finish_async();
  if (block.cluster) [[unlikely]]
    finish_in_cluster();
  for (int i = 0; i < warp->open; ++i) {
    Rendezvous& r = warp->rendezvous[i];
    if (r.mask >> me->lane & 1)
      fail(r.site, "a thread exited while lanes %08x of its warp wait for it in %s (mask %08x)", r.arrived,
           call_name(r.kind), r.mask);
  }
  if (machine.watched && !warp->live) [[unlikely]]
    watch_exit(*warp);
  Barrier& all = block.barrier[0];
  if (all.arrived && all.arrived == block.live) complete(all, false);
  Fiber* next = next_in_warp(warp, me->slot_bit);
  if (!next) next = next_in_block(warp);
  if (next) run(next);
  if (block.live) run(next_after_all());
  simt_fiber_switch(&me->stack_pointer, machine.main_stack_pointer);
  abort();
}

}  // namespace simt

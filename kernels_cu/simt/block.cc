#include "block.h"

namespace simt {

Fiber* next_in_block(Warp* warp) {
  Block& block = *machine.block;
  int first = int(warp - block.warp);
  for (int i = 1; i <= block.warps; ++i) {
    Warp& other = block.warp[(first + i) % block.warps];
    if (other.ready) return other.slots + __builtin_ctz(other.ready);
  }
  return nullptr;
}

static SIMT_COLD void say_waits(const Block& block) {
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

[[noreturn]] static SIMT_COLD void report_deadlock() {
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

void yield_block(bool must) {
  machine.turn_over = must;
  machine.block->resume = current;
  simt_fiber_switch(&current->stack_pointer, machine.main_stack_pointer);
}

static bool can_run(const Block& block) {
  uint32_t ready = 0;
  for (int w = 0; block.live && w < block.warps; ++w) ready |= block.warp[w].ready;
  return ready;
}

Fiber* next_after_all() {
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

/// Every SLICE steps: enforces the step limit, and lets other threads run so that a thread may spin on its
/// own block.
void look_up() {
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

Barrier& named_barrier(int id, int threads, Site site) {
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

void named_barrier_sync(int id, int threads, Site site) {
  arrive(named_barrier(id, threads, site), threads, false, site);
}

void named_barrier_arrive(int id, int threads, Site site) {
  arrive(named_barrier(id, threads, site), threads, true, site);
}

void retire() {
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

// warpgroup_calls: calls in which the 128 threads of a warpgroup meet, setmaxnreg among them; and elect.
#pragma once
#include "warp.h"

namespace simt {

/// The running thread's warpgroup, which must be whole.
SIMT_INLINE Warpgroup& own_warpgroup(const char* call, Site site) {
  Block& block = *machine.block;
  int g = thread_number() / WARPGROUP;
  if ((g + 1) * WARPGROUP > block.threads) [[unlikely]]
    fail(site, "%s by warp %d, but the block's %d threads hold only part of its warpgroup, warps %d to %d",
         call, current->warp->id, block.threads, 4 * g, 4 * g + 3);
  if (!block.warpgroups) [[unlikely]] {
    block.warpgroups = static_cast<Warpgroups*>(zeroed(sizeof(Warpgroups)));
    start_warpgroups(block);
  }
  return block.warpgroups->group[g];
}

/// The running thread waits with those that have come before.
SIMT_INLINE void sleep_in(WarpgroupMeeting& m) {
  Warp* warp = current->warp;
  m.warp[warp->id % 4] = warp;
  m.waiting_slots[warp->id % 4] |= current->slot_bit;
  warp->ready &= ~current->slot_bit;
  wait();
}
void wake(WarpgroupMeeting& m);
/// Comes to a meeting of the warpgroup; true for the last. Waits may be reached at different places.
SIMT_INLINE bool come_to(WarpgroupMeeting& m, Access kind, int value, Site site) {
  bool differs = m.kind != kind || m.value != value || (kind != Access::wgmma_wait && !(m.site == site));
  if (m.arrived && differs) [[unlikely]]
    fail(site, "divergent warpgroup: %s is reached while %d of its threads wait in %s at %s:%d",
         warpgroup_call(kind), m.arrived, warpgroup_call(m.kind), m.site.name(), m.site.line);
  m.kind = kind, m.value = value, m.site = site;
  return ++m.arrived == WARPGROUP;
}

// ---- setmaxnreg

/// setmaxnreg.inc (`more`) or .dec: from here on a thread of the warpgroup has `count` registers. An increase
/// waits until the block has enough of them left.
SIMT_COLD void setmaxnreg(int count, bool more, Site site = Site::here());

// ---- elect

/// True in one lane of the warp, in every call the same. NOTE: which one, is the hardware's affair, so it
/// differs between orders of threads here.
SIMT_INLINE bool elect_one(Site site = Site::here()) {
  meet(ALL, Access::vote, nullptr, [](void**, uint32_t) { ++machine.counters.collectives; }, site);
  Order order = Order(machine.launch.order);
  int leader = order == Order::forward   ? 0
               : order == Order::reverse ? LANES - 1
                                         : int(machine.launch.seed * 7 + 5);
  return current->lane == leader % LANES;
}

}  // namespace simt

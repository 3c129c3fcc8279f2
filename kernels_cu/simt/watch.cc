#include "watch.h"

namespace simt {

void watch_global(uint64_t address, size_t bytes, Access access, Site site) {
  if (traced()) trace_lane(site, access, address, int(bytes));
}

void watch_copy(uint64_t from, size_t offset, size_t bytes, Site site) {
  watch_global(from | uint64_t(offset / 32) << 48, bytes, Access::global_copy, site);
}

void watch_load(void* to, const void* from, uint64_t address, size_t bytes, Site site) {
  watch_global(address, bytes, Access::global_load, site);
  if (machine.block->held) return read_held(to, address, bytes);
  memcpy(to, from, bytes);
}

void watch_store(void* to, const void* from, uint64_t address, size_t bytes, Site site) {
  watch_global(address, bytes, Access::global_store, site);
  if (machine.block->held) return hold(address, from, bytes);
  memcpy(to, from, bytes);
}

void watch_shared(size_t offset, size_t bytes, Touch touch, Access access, Site site) {
  if (traced()) trace_lane(site, access, offset, int(bytes));
  if (machine.block->shadow) touch_shared(offset, bytes, touch, site);
}

void watch_call(Access access, Site site) {
  if (traced()) trace_lane(site, access, 0, 0);
}

void watch_meeting(Warp& warp, Access access, uint32_t lanes, Site site) {
  if (traced()) trace_meeting(warp, site, access, lanes);
  if (access != Access::warp_barrier) return;
  Block& block = *machine.block;
  if (block.clocks) meet_lanes(*block.clocks, block.rank * block.warps + warp.id, lanes);
  if (traced() && !(warp.live & ~lanes)) end_step(warp, site, access);
}

/// What is known at one of the running block's barriers.
static Known& known_at(const Barrier& barrier) {
  Block& block = *machine.block;
  return block.clocks->barrier[block.rank * BARRIERS + (&barrier - block.barrier)];
}

void watch_arrival(Barrier& barrier, Site site) {
  Block& block = *machine.block;
  bool named = &barrier != block.barrier;
  watch_call(named ? Access::named_barrier : Access::block_barrier, site);
  if (block.clocks && (named || block.clocks->blocks > 1))
    release(*block.clocks, clock_number(), known_at(barrier));
}

void watch_barrier(Barrier& barrier, bool waits) {
  Block& block = *machine.block;
  Access access = &barrier == block.barrier ? Access::block_barrier : Access::named_barrier;
  int waiting = waits;
  for (int w = 0; w < block.warps; ++w) waiting += __builtin_popcount(barrier.waiting_slots[w]);
  // NOTE: a thread that has left counts as having met the others at __syncthreads, and nowhere else.
  bool everybody = waiting == (access == Access::block_barrier ? block.live : block.threads) &&
                   !(block.clocks && block.clocks->blocks > 1);
  for (int w = 0; w < block.warps; ++w) {
    Warp& warp = block.warp[w];
    uint32_t met = 0;
    for (uint32_t slots = barrier.waiting_slots[w]; slots; slots &= slots - 1)
      met |= 1u << warp.slots[__builtin_ctz(slots)].lane;
    if (waits && &warp == current->warp) met |= 1u << current->lane;
    if (block.clocks && !everybody)
      for (uint32_t left = met; left; left &= left - 1)
        acquire(*block.clocks, (block.rank * block.warps + warp.id) * LANES + __builtin_ctz(left),
                known_at(barrier));
    if (traced() && met && !(warp.live & ~met))
      close_instructions(warp), end_step(warp, barrier.site, access);
  }
  if (!block.clocks) return;
  if (everybody) meet_all(*block.clocks);
  known_at(barrier).epoch = 0;
}

void watch_fence(Site site, bool device) {
  watch_call(Access::fence, site);
  if (machine.block->clocks) clock_fence(*machine.block->clocks, clock_number());
  if (device && machine.block->held) publish_fenced();
}

void watch_proxy_fence(Site site) {
  watch_call(Access::proxy_fence, site);
  if (machine.block->clocks) clock_proxy_fence(*machine.block->clocks, clock_number());
}

void watch_shared_atomic(size_t offset, size_t bytes, Site site) {
  watch_shared(offset, bytes, Touch::atomic, Access::shared_atomic, site);
  if (machine.block->clocks)
    clock_atomic(*machine.block->clocks, clock_number(), offset | uint64_t(machine.block->rank) << 40);
}

void watch_global_atomic(uint64_t address, size_t bytes, Site site) {
  watch_global(address, bytes, Access::global_atomic, site);
  if (machine.block->clocks) clock_atomic(*machine.block->clocks, clock_number(), address);
  if (machine.block->held) publish_bytes(address);
}

void watch_exit(Warp& warp) {
  if (traced()) close_instructions(warp), end_step(warp, {"", 0, 0}, Access::exit);
}

}  // namespace simt

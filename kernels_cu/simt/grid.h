// grid: this process's share of a launch's blocks: made, set up, and given their turns, one or several in
// flight.
#pragma once
#include "cluster.h"
#include "tma.h"

extern "C" long sysconf(int);

namespace simt {

/// splitmix64: the next number of a sequence, which `state` walks through.
inline uint64_t random_number(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/// Fills `out` with 0 … n − 1 in the order asked for.
template <class Int> inline void fill_order(Int* out, Int n, Order order, uint64_t seed) {
  for (Int i = 0; i < n; ++i) out[i] = order == Order::reverse ? n - 1 - i : i;
  if (order != Order::shuffle) return;
  for (Int i = n; i > 1; --i) {
    Int j = Int(random_number(seed) % i), other = out[j];
    out[j] = out[i - 1], out[i - 1] = other;
  }
}

inline void fiber_main(void*) {
  machine.entry(machine.entry_arguments);
  retire();
}

/// Lays out a block's threads in this block's order and poisons its shared memory.
inline void set_up_block(Block& block, uint64_t linear) {
  const Launch& launch = machine.launch;
  uint64_t gx = launch.grid[0], gy = launch.grid[1];
  block.index = {uint32_t(linear % gx), uint32_t(linear / gx % gy), uint32_t(linear / (gx * gy))};
  block.linear = linear;
  block.live = block.threads;
  block.steps = 0;
  memset(block.barrier, 0, sizeof block.barrier);
  memset(block.shared, 0xff, launch.smem_bytes);
  if (block.shadow) clear_shadow(*block.shadow);
  if (block.async) clear_async(*block.async);
  if (block.clocks && !block.rank) start_clocks(*block.clocks);
  start_warpgroups(block);
  Order order = Order(launch.order);
  uint64_t seed = launch.seed * 0x2545f4914f6cdd1dull + linear;
  uint32_t ids[MAX_WARPS], lanes[LANES];
  fill_order(ids, uint32_t(block.warps), order, seed);
  int first_stack = int(&block - machine.blocks) * block.warps * LANES;
  for (int w = 0; w < block.warps; ++w) {
    Warp& warp = block.warp[w];
    warp.id = int(ids[w]);
    warp.ready = warp.live = 0, warp.open = 0;
    if (block.traffic) block.traffic->warp[warp.id].step = {};
    fill_order(lanes, uint32_t(LANES), order, seed + 1 + w);
    for (int slot = 0; slot < LANES; ++slot) {
      uint32_t thread = ids[w] * LANES + lanes[slot];
      if (thread >= uint32_t(block.threads)) continue;
      Fiber& fiber = warp.slots[slot];
      fiber.thread_idx = thread_at(thread);
      fiber.warp = &warp;
      fiber.lane = int(lanes[slot]);
      fiber.slot_bit = 1u << slot;
      fiber.copies.count = fiber.copies.groups = 0;
      fiber.stack_pointer =
          fiber_start(launch.resources->stacks.top(first_stack + w * LANES + slot), fiber_main, nullptr);
      warp.ready |= fiber.slot_bit;
      warp.live |= 1u << fiber.lane;
    }
  }
  block.resume = block.warp[0].slots + __builtin_ctz(block.warp[0].ready);
}

/// Runs a block until it ends or another should have its turn.
inline void give_turn(Block& block) {
  machine.block = &block;
  machine.shared = block.shared;
  machine.slice = SLICE;
  machine.turn_over = false;
  current = block.resume;
  simt_fiber_switch(&machine.main_stack_pointer, current->stack_pointer);
  current = nullptr;
}

/// The blocks of this process in the launch's order; of a launch with clusters, the clusters.
struct Sequence {
  uint64_t count, next;
  uint64_t* shuffled;

  bool more() const { return next < count; }
  uint64_t take() {
    uint64_t i = next;
    next += uint64_t(machine.launch.workers);
    if (shuffled) return shuffled[i];
    return Order(machine.launch.order) == Order::reverse ? count - 1 - i : i;
  }
};

/// Which of `flying` blocks, oldest first, goes on; `flying` itself: one more starts, if it `may_start`.
///
/// In a shuffled order any of them. Otherwise the newest: the others stay where they were, each behind its
/// last atomic, until it has ended, which is when a missing fence shows. A block that gets nowhere hands over
/// to the next.
inline int pick_turn(int flying, int ran, bool may_start, uint64_t& random) {
  if (Order(machine.launch.order) == Order::shuffle)
    return int(random_number(random) % uint64_t(flying + may_start));
  if (may_start) return flying;
  if (!machine.turn_over) return flying - 1;
  return (ran + 1) % flying;
}

inline bool cluster_is_over(const Block& block) {
  int live = 0;
  for (int rank = 0; rank < machine.launch.cluster; ++rank) live += (&block - block.rank)[rank].live;
  return !live;
}

/// Runs the blocks, launch.resident at a time.
inline void run_blocks(Sequence sequence) {
  Block* flying[MAX_RESIDENT];
  int count = 0, ran = 0, resident = machine.launch.resident, cluster = machine.launch.cluster;
  int clusters = resident / cluster;
  uint32_t unused = clusters == 32 ? ~0u : (1u << clusters) - 1u;
  uint64_t random = machine.launch.seed;
  for (int patience = 0; count || sequence.more();) {
    if (++patience % 1024 == 0) machine.turn_over = true;  // blocks may wait for each other by atomics alone
    int i = resident == 1 ? 0 : pick_turn(count, ran, unused && sequence.more(), random);
    if (i == count) {
      Block* first = machine.blocks + __builtin_ctz(unused) * cluster;
      unused &= unused - 1;
      uint64_t linear = sequence.take() * uint64_t(cluster);
      for (int rank = 0; rank < cluster; ++rank)
        set_up_block(*(flying[count++] = first + rank), linear + rank);
    }
    give_turn(*flying[ran = i]);
    if (machine.failed) return;
    if (flying[i]->live) continue;
    publish_all(*flying[i]);
    ++machine.counters.blocks;
    if (cluster_is_over(*flying[i])) unused |= 1u << (flying[i] - machine.blocks) / cluster;
    memmove(flying + i, flying + i + 1, (--count - i) * sizeof flying[0]);
  }
}

inline size_t page_bytes() {
#if defined(__APPLE__)
  return 16384;
#else
  return size_t(sysconf(30));  // _SC_PAGESIZE
#endif
}

/// Shared memory for `count` blocks, `bytes` each; the window in which kernels see it is made once.
inline bool reserve_shared(Resources& resources, size_t bytes, int count) {
  auto map = [](size_t size, int protection) {
    void* p = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
  };
  if (!resources.shared_window) resources.shared_window = map(SHARED_WINDOW_BYTES, PROT_NONE);
  if (bytes * count > resources.shared_capacity) {
    if (resources.shared_memory) munmap(resources.shared_memory, resources.shared_capacity);
    resources.shared_capacity = bytes * count;
    resources.shared_memory = map(resources.shared_capacity, PROT_READ | PROT_WRITE);
  }
  return resources.shared_window && resources.shared_memory;
}

/// Makes the blocks of a launch, with what watching them needs; false if there is no memory.
inline bool make_blocks(int warps, int threads) {
  const Launch& launch = machine.launch;
  int count = launch.resident;
  size_t stride = (launch.smem_bytes + page_bytes()) / page_bytes() * page_bytes();
  if (!launch.resources->stacks.reserve(count * warps * LANES, page_bytes()) ||
      !reserve_shared(*launch.resources, stride, count))
    return false;
  machine.blocks = static_cast<Block*>(calloc(count, sizeof(Block)));
  if (!machine.blocks) return false;
  machine.shared_window = launch.resources->shared_window;
  for (int i = 0; i < count; ++i) {
    Block& block = machine.blocks[i];
    block.threads = threads, block.warps = warps;
    block.shared = launch.resources->shared_memory + i * stride;
    block.rank = i % launch.cluster;
    if (block.rank)
      block.clocks = (&block)[-1].clocks;
    else if (launch.races || count > 1)
      block.clocks = make_clocks(warps, launch.cluster, machine.async_proxy);
    if (launch.cluster > 1) make_cluster(block);
    if (launch.races) block.shadow = make_shadow(launch.smem_bytes);
    if (count > 1) block.held = make_held();
    if (launch.trace) block.traffic = static_cast<Traffic*>(zeroed(sizeof(Traffic)));
  }
  machine.watched = launch.races || launch.trace || count > 1;
  return true;
}
inline void free_blocks() {
  for (int i = 0; i < machine.launch.resident; ++i) {
    Block& block = machine.blocks[i];
    if (!block.rank) free_clocks(block.clocks);
    free_async(block.async), free_cluster(block);
    free_shadow(block.shadow), free_held(block.held), free_traffic(block.traffic);
    free_warpgroups(block.warpgroups);
    for (int w = 0; w < block.warps; ++w)
      for (Fiber& fiber : block.warp[w].slots) free(fiber.copies.items), free(fiber.copies.group_ends);
  }
  free(machine.blocks);
  machine.block = machine.blocks = nullptr;
}

}  // namespace simt

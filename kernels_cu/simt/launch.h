// launch: the entry of a generated shared object. Runs this process's share of a grid, one block after
// another.
#pragma once
#include <utility>

#include "async.h"
#include "fault.h"
#include "mma.h"

extern "C" long sysconf(int);

namespace simt {

/// Denormals are flushed to zero as on the device (-ftz=true), while this lives.
struct FlushDenormals {
#if defined(__x86_64__)
  unsigned before = __builtin_ia32_stmxcsr();
  FlushDenormals() { __builtin_ia32_ldmxcsr(before | 0x8040u); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }
#else
  uint64_t before;
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" ::"r"(before | (uint64_t(1) << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#endif
};

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
  if (block.clocks) meet_all(*block.clocks);
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

/// The blocks of this process in the launch's order.
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
/// In a shuffled order any of them. Otherwise the newest: the others stay where they were, each behind its last
/// atomic, until it has ended, which is when a missing fence shows. A block that gets nowhere hands over to the next.
inline int pick_turn(int flying, int ran, bool may_start, uint64_t& random) {
  if (Order(machine.launch.order) == Order::shuffle)
    return int(random_number(random) % uint64_t(flying + may_start));
  if (may_start) return flying;
  if (!machine.turn_over) return flying - 1;
  return (ran + 1) % flying;
}

/// Runs the blocks, launch.resident at a time.
inline void run_blocks(Sequence sequence) {
  Block* flying[MAX_RESIDENT];
  int count = 0, ran = 0, resident = machine.launch.resident;
  uint32_t unused = resident == 32 ? ~0u : (1u << resident) - 1u;
  uint64_t random = machine.launch.seed;
  for (int patience = 0; count || sequence.more();) {
    if (++patience % 1024 == 0) machine.turn_over = true;  // blocks may wait for each other by atomics alone
    int i = resident == 1 ? 0 : pick_turn(count, ran, count < resident && sequence.more(), random);
    if (i == count) {
      flying[count++] = machine.blocks + __builtin_ctz(unused);
      unused &= unused - 1;
      set_up_block(*flying[i], sequence.take());
    }
    give_turn(*flying[ran = i]);
    if (machine.failed) return;
    if (flying[i]->live) continue;
    publish_all(*flying[i]);
    ++machine.counters.blocks;
    unused |= 1u << (flying[i] - machine.blocks);
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
    if (launch.races || count > 1) block.clocks = make_clocks(warps);
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
    free_clocks(block.clocks), free_shadow(block.shadow), free_held(block.held), free_traffic(block.traffic);
    for (int w = 0; w < block.warps; ++w)
      for (Fiber& fiber : block.warp[w].slots) free(fiber.copies.items), free(fiber.copies.group_ends);
  }
  free(machine.blocks);
  machine.block = machine.blocks = nullptr;
}

/// Takes over the launch; false, with a message, if it cannot run.
inline bool prepare(const Launch& launch, Report& report) {
  machine.launch = launch;
  machine.counters = {};
  machine.report = &report;
  machine.failed = false;
  report.message[0] = 0, report.race = 0;
  recent_extent = {};
  machine.grid_dim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  machine.block_dim = {launch.block[0], launch.block[1], launch.block[2]};
  uint64_t threads = uint64_t(launch.block[0]) * launch.block[1] * launch.block[2];
  if (threads < 1 || threads > MAX_WARPS * LANES) {
    say("%s: a block of %llu threads: expected 1 to 1024", launch.kernel,
        static_cast<unsigned long long>(threads));
    return false;
  }
  if (launch.smem_bytes > SHARED_WINDOW_BYTES) {
    say("%s: %llu bytes of shared memory: expected at most %zu", launch.kernel,
        static_cast<unsigned long long>(launch.smem_bytes), SHARED_WINDOW_BYTES);
    return false;
  }
  if (make_blocks(int(threads + LANES - 1) / LANES, int(threads))) return true;
  say("%s: no memory for the stacks and the shared memory of %d blocks", launch.kernel, launch.resident);
  return false;
}

inline int run_grid(const Launch& launch, Report& report) {
  if (!prepare(launch, report)) return 1;
  FaultHandler faults;
  FlushDenormals flush;
  uint64_t blocks = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  uint64_t* order = nullptr;
  if (Order(launch.order) == Order::shuffle) {
    order = static_cast<uint64_t*>(malloc(blocks * sizeof(uint64_t)));
    if (!order) return say("%s: no memory for the order of %zu blocks", launch.kernel, size_t(blocks)), 1;
    fill_order(order, blocks, Order::shuffle, launch.seed);
  }
  run_blocks({blocks, uint64_t(launch.worker), order});
  free(order);
  free_blocks();
  machine.counters.launches = launch.worker == 0;
  report.counters = machine.counters;
  return machine.failed;
}

/// Whether as many arguments came as the kernel takes, each of its size. NOTE: a GPU would not notice.
inline bool arguments_fit(const Launch& launch, const uint32_t* wanted, int count, Report& report) {
  machine.report = &report;
  if (launch.argument_count != count) {
    say("%s takes %d arguments, got %d", launch.kernel, count, launch.argument_count);
    return false;
  }
  for (int i = 0; i < count; ++i)
    if (launch.argument_bytes[i] != wanted[i]) {
      say("%s: argument %d has %u bytes, expected %u", launch.kernel, i + 1, launch.argument_bytes[i],
          wanted[i]);
      return false;
    }
  return true;
}

template <class... Parameters> struct Call {
  void (*kernel)(Parameters...);
  void** arguments;
  template <size_t... I> void unpack(std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cvref_t<Parameters>*>(arguments[I])...);
  }
  static void run(void* self) { static_cast<Call*>(self)->unpack(std::index_sequence_for<Parameters...>()); }
};

template <class... Parameters>
int launch(void (*kernel)(Parameters...), const Launch* request, void** arguments, Report* report) {
  const uint32_t wanted[] = {uint32_t(sizeof(std::remove_cvref_t<Parameters>))..., 0};
  if (!arguments_fit(*request, wanted, int(sizeof...(Parameters)), *report)) return 1;
  Call<Parameters...> call{kernel, arguments};
  machine.entry = Call<Parameters...>::run;
  machine.entry_arguments = &call;
  return run_grid(*request, *report);
}

}  // namespace simt

/// Makes a kernel callable from outside: 0 when all went well, else the report holds a message.
#define SIMT_EXPORT(kernel)                                                   \
  extern "C" __attribute__((visibility("default"))) int simt_launch_##kernel( \
      const simt::Launch* request, void** arguments, simt::Report* report) {  \
    return simt::launch(kernel, request, arguments, report);                  \
  }

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

inline uint3 thread_at(uint32_t i) {
  uint32_t x = machine.block_dim.x, y = machine.block_dim.y;
  return {i % x, i / x % y, i / (x * y)};
}

/// Lays out the block's threads in this block's order and poisons its shared memory.
inline void set_up_block(uint64_t linear) {
  Block& block = machine.block;
  const Launch& launch = machine.launch;
  uint64_t gx = launch.grid[0], gy = launch.grid[1];
  block.index = {uint32_t(linear % gx), uint32_t(linear / gx % gy), uint32_t(linear / (gx * gy))};
  block.live = block.threads;
  memset(block.barrier, 0, sizeof block.barrier);
  memset(block.shared, 0xff, launch.smem_bytes);
  Order order = Order(launch.order);
  uint64_t seed = launch.seed * 0x2545f4914f6cdd1dull + linear;
  uint32_t ids[MAX_WARPS], lanes[LANES];
  fill_order(ids, uint32_t(block.warps), order, seed);
  for (int w = 0; w < block.warps; ++w) {
    Warp& warp = block.warp[w];
    warp.id = int(ids[w]);
    warp.ready = warp.live = 0, warp.open = 0;
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
      fiber.stack_pointer = fiber_start(launch.resources->stacks.top(w * LANES + slot), fiber_main, nullptr);
      warp.ready |= fiber.slot_bit;
      warp.live |= 1u << fiber.lane;
    }
  }
}

inline void run_block(uint64_t linear) {
  set_up_block(linear);
  machine.slice = SLICE;
  machine.steps = 0;
  Warp& first = machine.block.warp[0];
  current = first.slots + __builtin_ctz(first.ready);
  simt_fiber_switch(&machine.main_stack_pointer, current->stack_pointer);
  current = nullptr;
  ++machine.counters.blocks;
}

inline bool reserve_shared(Resources& resources, size_t bytes, size_t page) {
  size_t rounded = (bytes + 1023) & ~size_t(1023);
  if (!resources.shared_end || rounded > resources.shared_capacity) {
    size_t capacity = (rounded + page - 1) / page * page;
    void* p = mmap(nullptr, capacity + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return false;
    // A smaller one before it stays mapped: that is rare.
    resources.shared_end = static_cast<char*>(p) + capacity;
    resources.shared_capacity = capacity;
    if (mprotect(resources.shared_end, page, PROT_NONE) != 0) return false;
  }
  machine.block.shared = resources.shared_end - rounded;
  return true;
}

/// Takes over the launch; false, with a message, if it cannot run.
inline bool prepare(const Launch& launch, Report& report) {
  machine.launch = launch;
  machine.counters = {};
  machine.report = &report;
  machine.failed = false;
  report.message[0] = 0;
  recent_extent = {};
  machine.grid_dim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  machine.block_dim = {launch.block[0], launch.block[1], launch.block[2]};
  uint64_t threads = uint64_t(launch.block[0]) * launch.block[1] * launch.block[2];
  if (threads < 1 || threads > MAX_WARPS * LANES) {
    say("%s: a block of %llu threads: expected 1 to 1024", launch.kernel,
        static_cast<unsigned long long>(threads));
    return false;
  }
  machine.block.threads = int(threads);
  machine.block.warps = int((threads + LANES - 1) / LANES);
#if defined(__APPLE__)
  size_t page = 16384;
#else
  size_t page = size_t(sysconf(30));  // _SC_PAGESIZE
#endif
  Resources& resources = *launch.resources;
  if (!resources.stacks.reserve(machine.block.warps * LANES, page) ||
      !reserve_shared(resources, launch.smem_bytes, page)) {
    say("%s: no memory for the stacks and the shared memory of a block", launch.kernel);
    return false;
  }
  return true;
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
  for (uint64_t i = uint64_t(launch.worker); i < blocks && !machine.failed; i += uint64_t(launch.workers))
    run_block(order ? order[i] : Order(launch.order) == Order::reverse ? blocks - 1 - i : i);
  free(order);
  for (int w = 0; w < machine.block.warps; ++w)
    for (Fiber& fiber : machine.block.warp[w].slots) {
      free(fiber.copies.items), free(fiber.copies.group_ends);
      fiber.copies = {};
    }
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

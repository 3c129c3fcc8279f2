#include "launch.h"

#include "fault.h"
#include "grid.h"

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

/// Takes over the launch; false, with a message, if it cannot run.
static bool prepare(const Launch& launch, Report& report) {
  machine.launch = launch;
  int cluster = machine.launch.cluster = launch.cluster > 1 ? launch.cluster : 1;
  if (launch.resident < cluster)
    machine.launch.resident = cluster;
  else
    machine.launch.resident -= launch.resident % cluster;
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

int run_grid(const Launch& launch, Report& report) {
  if (!prepare(launch, report)) return 1;
  FaultHandler faults;
  FlushDenormals flush;
  uint64_t blocks = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  uint64_t sequences = blocks / uint64_t(machine.launch.cluster);
  uint64_t* order = nullptr;
  if (Order(launch.order) == Order::shuffle) {
    order = static_cast<uint64_t*>(malloc(sequences * sizeof(uint64_t)));
    if (!order) return say("%s: no memory for the order of %zu blocks", launch.kernel, size_t(blocks)), 1;
    fill_order(order, sequences, Order::shuffle, launch.seed);
  }
  run_blocks({sequences, uint64_t(launch.worker), order});
  free(order);
  free_blocks();
  machine.counters.launches = launch.worker == 0;
  report.counters = machine.counters;
  return machine.failed;
}

bool arguments_fit(const Launch& launch, const uint32_t* wanted, int count, Report& report) {
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

}  // namespace simt

// state: the blocks in flight (their threads, warps, barriers), what a launch asks for, and how a mistake
// becomes a message.
//
// One launch runs at a time in a process, on one OS thread, one fiber at a time; so the state is plain
// globals.
#pragma once
#include <stdlib.h>

#include <source_location>

#include "fiber.h"

// SIMT_CALL: what most kernels call; its body is in calls.h, which a quick build links. What else it inlines, its
// compiler chooses.
#if defined(SIMT_QUICK)
#define SIMT_INLINE inline
#define SIMT_CALL
#else
#define SIMT_INLINE inline __attribute__((always_inline))
#if !defined(SIMT_CALL)
#define SIMT_CALL SIMT_INLINE
#endif
#endif
#define SIMT_COLD __attribute__((noinline, cold))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// NOTE: not in namespace simt, or argument-dependent lookup would find simt's functions beside those of prim/
// of the same name.
namespace simt_site {
/// Where a kernel called from. As a default argument it names the caller's place, not the header's. A column
/// tells calls on one line apart.
struct Site {
  const char* file;
  int line;
  unsigned column;
  static constexpr Site here(std::source_location at = std::source_location::current()) {
    return {at.file_name(), int(at.line()), unsigned(at.column())};
  }
  bool operator==(const Site& other) const {
    return line == other.line && column == other.column && (file == other.file || !strcmp(file, other.file));
  }
  /// The file's name without its folder.
  const char* name() const {
    const char* slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
  }
};
}  // namespace simt_site

namespace simt {

using simt_site::Site;

constexpr int LANES = 32, MAX_WARPS = 32, BARRIERS = 16, MAX_RESIDENT = 32;
constexpr size_t SHARED_WINDOW_BYTES = 1 << 20;

/// The device addresses that one pointer argument of a launch may touch.
struct Extent {
  uint64_t first, end;
  const char* name;
};

enum class Order : int { forward, reverse, shuffle };

/// What outlives a launch and serves every kernel of the process; the caller keeps it, all zero at first.
struct Resources {
  StackPool stacks;
  char* shared_window;  // where kernels see a block's shared memory: reserved, never mapped
  char* shared_memory;  // where it is, one block after another
  size_t shared_capacity;
};

struct Trace;

/// One launch as the caller describes it; mirrored by cuattn/cpu_child.py.
struct Launch {
  const char* kernel;
  uint32_t grid[3], block[3];
  uint64_t smem_bytes;
  const Extent* extents;
  int32_t extent_count;
  int32_t order;            // simt::Order, of threads within a warp, of warps and of blocks
  uint64_t seed;            // of Order::shuffle
  int32_t copies_late;      // cp.async happens when waited for; otherwise when issued
  int32_t worker, workers;  // this process runs blocks worker, worker + workers, … in the order's sequence
  int32_t fault_fd;         // where a fault is reported before the process ends; -1 is stderr
  uint64_t window, window_bytes;  // device addresses: reserved, never mapped
  int64_t window_to_memory;       // added to a device address to reach the memory behind it
  Resources* resources;
  uint64_t step_limit;             // steps a block may take; a step is a load, an atomic or a wait
  const uint32_t* argument_bytes;  // of each argument that came
  int32_t argument_count;
  int32_t resident;  // blocks in flight; above 1 they take turns, and their global stores are held back
  int32_t races;     // whether to look for races in shared memory
  Trace* trace;      // where to count by call site; null: nowhere
  int32_t cluster;   // neighbours along x that run together; 0 and 1: none
};

/// What a launch did. The counters are those of cuattn.machine.Counters, in its order.
struct Counters {
  uint64_t launches, blocks, barriers, collectives, atomics, mma, bytes_loaded, bytes_stored, bytes_async, wgmma;
};
struct Report {
  Counters counters;
  int32_t race;        // whether the message is about a race
  char message[8192];  // empty when all went well
};

struct Warp;

/// A cp.async that has been issued and has not happened.
struct Copy {
  char* to;
  uint64_t from;
  int bytes, source_bytes;
  Site site;
};
struct CopyQueue {
  Copy* items;
  int* group_ends;  // groups[i] is items up to group_ends[i]
  int count, capacity, groups, group_capacity;
};

struct Fiber {
  void* stack_pointer;
  uint3 thread_idx;
  Warp* warp;
  int lane;
  uint32_t slot_bit;  // the fiber's place in its warp's running order
  CopyQueue copies;
};

/// What a call site does. Mirrored by cuattn/cpu_trace.py, which says what is counted of each.
// clang-format off
enum class Access : int {
  global_load, global_store, global_copy, global_atomic,
  shared_load, shared_store, shared_copy, shared_atomic, ldmatrix, stmatrix,
  mma, shuffle, vote, warp_barrier, block_barrier, named_barrier, fence, copy_commit, copy_wait,
  wgmma, wgmma_fence, wgmma_commit, wgmma_wait, proxy_fence, setmaxnreg,
  mbarrier_init, mbarrier_arrive, mbarrier_wait, bulk_load, bulk_store, bulk_commit, bulk_wait,
  cluster_barrier, exit
};
// clang-format on
constexpr bool is_global(Access a) { return a <= Access::global_atomic; }
constexpr bool is_shared(Access a) { return a >= Access::shared_load && a <= Access::stmatrix; }

/// A call in which lanes meet, as messages name it.
SIMT_COLD const char* call_name(Access call);

/// Lanes of a warp that meet in one call. Arguments lie on the lanes' own stacks, which stand still while
/// they wait.
struct Rendezvous {
  uint32_t mask, arrived, waiting_slots;
  Access kind;
  Site site;
  void* arguments[LANES];
};

/// Where ldmatrix and mma.sync exchange fragments, indexed by lane. d[0] holds rows 0…7, d[1] rows 8…15 of
/// the product.
struct alignas(64) MmaBuffer {
  uint32_t a[4][LANES], b[8][8];
  float d[2][2 * LANES];
  const char* row[LANES];
  uint32_t matrix[4][LANES];
};

struct Warp {
  uint32_t ready;  // slots that can run
  uint32_t live;   // lanes that have not exited
  int id;
  int open;            // rendezvous under way
  Fiber slots[LANES];  // in running order
  Rendezvous rendezvous[LANES];
  MmaBuffer mma;
};

struct Barrier {
  int arrived, expected;  // expected 0: every live thread of the block
  Site site;
  uint32_t waiting_slots[MAX_WARPS];
};

struct Warpgroups;
struct Clocks;
struct Async;
struct ClusterBarrier;
struct Shadow;
struct HeldStores;
struct Traffic;

struct Block {
  uint3 index;
  uint64_t linear;
  int threads, warps, live;
  char* shared;
  Fiber* resume;  // who goes on when the block gets its turn
  uint64_t steps;
  int rank;                 // in its cluster
  Async* async;             // its mbarriers and bulk copies; null until it has one
  ClusterBarrier* cluster;  // one of all blocks of a cluster; null without clusters
  Warpgroups* warpgroups;  // null until one is used as such
  // What watching needs; null where nobody asked for it.
  Clocks* clocks;  // one of all blocks of a cluster
  Shadow* shadow;
  HeldStores* held;
  Traffic* traffic;
  Barrier barrier[BARRIERS];
  Warp warp[MAX_WARPS];  // in running order
};

struct Machine {
  Launch launch;
  Counters counters;
  Report* report;
  Block* blocks;  // as many as may be in flight
  Block* block;   // the one that runs
  char* shared;   // its shared memory, which it sees at shared_window
  char* shared_window;
  bool watched;               // somebody asked for races, for traffic, or for several blocks in flight
  bool async_proxy;           // the file has kernels that reach shared memory by it: wgmma, bulk copies
  uint3 block_dim, grid_dim;  // not dim3, whose ones would put the whole machine into the file
  void* main_stack_pointer;
  void (*entry)(void*);
  void* entry_arguments;
  bool failed, turn_over;  // turn_over: the block that ran waits for its turn and should not get it at once
  uint32_t slice;          // steps until the running thread must look up
};

__attribute__((visibility("hidden"))) constinit inline Machine machine{};
__attribute__((visibility("hidden"))) constinit inline Fiber* current = nullptr;

/// Appends to the report's message.
SIMT_COLD __attribute__((format(printf, 1, 2))) void say(const char* format, ...);

/// Abandons the launch from the fiber that runs: its fibers are never resumed.
[[noreturn]] SIMT_COLD void give_up();

/// Coordinates of thread number `i` of a block.
uint3 thread_at(uint32_t i);
/// The running thread's number in its block.
SIMT_INLINE int thread_number() { return current->warp->id * LANES + current->lane; }
/// Its number among the threads of its cluster: whose clock it has.
inline int clock_number() { return machine.block->rank * machine.block->warps * LANES + thread_number(); }

/// Ends the launch with one sentence about what this thread did.
[[noreturn]] SIMT_COLD __attribute__((format(printf, 2, 3))) void fail(Site site, const char* format, ...);

/// A device-side check failed.
[[noreturn]] SIMT_COLD void trap(const char* message, Site site = Site::here());

}  // namespace simt

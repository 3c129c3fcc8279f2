// watch: what the machine does besides running a kernel when somebody asked: races, traffic, several blocks
// in flight. The functions are called where machine.watched holds, and only there.
#pragma once
#include "held.h"
#include "shadow.h"
#include "trace.h"

namespace simt {

inline bool traced() { return machine.launch.trace != nullptr; }

SIMT_COLD void watch_global(uint64_t address, size_t bytes, Access access, Site site);
/// The global side of a cp.async. NOTE: a GPU reads a sector once for each sector of shared memory that it
/// fills part of, so the trace tells them apart by an address that no memory has.
SIMT_COLD void watch_copy(uint64_t from, size_t offset, size_t bytes, Site site);
SIMT_COLD void watch_load(void* to, const void* from, uint64_t address, size_t bytes, Site site);
SIMT_COLD void watch_store(void* to, const void* from, uint64_t address, size_t bytes, Site site);
SIMT_COLD void watch_shared(size_t offset, size_t bytes, Touch touch, Access access, Site site);
/// A call that a thread makes alone.
SIMT_COLD void watch_call(Access access, Site site);

/// Lanes of a warp have met in a shuffle, a vote, a product, …
SIMT_COLD void watch_meeting(Warp& warp, Access access, uint32_t lanes, Site site);

/// The running thread has come to a barrier.
SIMT_COLD void watch_arrival(Barrier& barrier, Site site);
/// A barrier is complete; its waiting threads go on, and with them the running one if it `waits` too.
SIMT_COLD void watch_barrier(Barrier& barrier, bool waits);

SIMT_COLD void watch_fence(Site site, bool device);
SIMT_COLD void watch_proxy_fence(Site site);
SIMT_COLD void watch_shared_atomic(size_t offset, size_t bytes, Site site);
SIMT_COLD void watch_global_atomic(uint64_t address, size_t bytes, Site site);

/// The last lane of a warp has left the kernel.
SIMT_COLD void watch_exit(Warp& warp);

}  // namespace simt

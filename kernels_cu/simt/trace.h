// trace: what a launch does, by call site: instructions, bytes, 32-byte sectors of global memory, passes
// through the banks of shared memory; and one block's steps from barrier to barrier.
//
// A GPU issues an instruction for a warp, here each lane comes alone. Lanes belong to one instruction if they
// make the same visit to a call site since their warp last met as a whole.
#pragma once
#include "clock.h"

namespace simt {

/// One call site's counters; mirrored by cuattn/cpu_child.py.
struct SiteRow {
  const char* file;
  int32_t line, column, access, unused;
  uint64_t instructions, lanes, bytes, sectors, wavefronts, conflicts;
  uint64_t first, end;  // the shared memory it touched
};
/// What a warp did up to a barrier.
struct StepRow {
  int32_t warp, step, ended_by, line;
  const char* file;
  uint64_t bytes_loaded, bytes_copied, bytes_stored, shared_loaded, shared_stored, mma, shuffles;
};
/// Where the caller wants it.
struct Trace {
  SiteRow* sites;
  StepRow* steps;
  int32_t site_capacity, step_capacity;
  int32_t site_count, step_count;  // may exceed the capacity: then the rest is missing
  uint64_t block;                  // whose steps
};

/// One instruction of a warp, as far as its lanes have come.
struct Instruction {
  uint32_t lanes;
  uint8_t bytes[LANES];
  uint64_t address[LANES];
};
/// The open instructions of one warp at one call site.
struct Visits {
  uint32_t visit[LANES];  // each lane's next
  Instruction* open;      // by visit
  int count, capacity;
};
struct WarpTraffic {
  Visits* visits;  // by call site
  int capacity;
  int *open_sites, open_count, open_capacity;
  StepRow step;
};
struct Traffic {
  WarpTraffic warp[MAX_WARPS];  // by the warp's id
};

void free_traffic(Traffic* t);

SIMT_COLD int find_site(Site site, Access access);

inline WarpTraffic& warp_traffic(const Warp& warp) { return machine.block->traffic->warp[warp.id]; }

/// The warp has met as a whole: what its lanes did before is complete.
void close_instructions(Warp& warp);

/// An access of the running lane to memory, or a call that it makes alone.
SIMT_COLD void trace_lane(Site site, Access access, uint64_t address, int bytes);

/// A bulk copy: the bytes and sectors of its global side, and the shared memory of its other.
SIMT_COLD void trace_bulk(Site site, Access access, uint64_t bytes, uint64_t sectors, uint64_t first,
                          uint64_t shared_bytes);

/// Lanes of a warp have met in a call.
SIMT_COLD void trace_meeting(Warp& warp, Site site, Access access, uint32_t lanes);

/// A step of the warp is over.
SIMT_COLD void end_step(Warp& warp, Site site, Access by);

}  // namespace simt

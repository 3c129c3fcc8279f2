// mbarrier: barriers in shared memory that count arrivals and bytes (sm_90). A phase is over when all
// expected arrivals have come and all announced bytes; the next one begins at once.
//
// The hardware keeps one bit of the phase. Here it is an integer, so that a wait which comes too late, for a
// phase that another of the same parity has followed, is an error and no hang. Arrivals release, a wait
// acquires.
#pragma once
#include "memory.h"

namespace simt {

constexpr char MBARRIER_BYTES[9] = "mbarrier";  // what lies in shared memory in its place

struct Mbarrier {
  uint32_t offset;  // in shared memory
  int expected, pending;
  int64_t bytes;    // announced and not come; negative: come and not announced
  uint32_t phase;   // the one under way
  bool filled;      // bytes were announced in it, or came
  bool fenced;      // the async proxy knows of it
  uint32_t seen;    // phases that somebody has waited for
  uint32_t copied;  // phases up to the last that a bulk copy completes
  Site init, copy;  // copy: the last bulk copy's
  int init_thread, counter;
  Site waited[MAX_WARPS];
  uint32_t waiting_slots[MAX_WARPS];
  Known arriving, over;  // what the arrivals of this phase release; those of the last
};

/// A bulk copy to shared memory under way, or one to global memory.
struct BulkCopy;

struct Async {
  Mbarrier mbarrier[MAX_COUNTERS];
  int mbarriers;
  BulkCopy* loads;  // those that have not happened, in the order of their issue
  int load_count, load_capacity;
  BulkCopy* stores;  // those that nobody has waited for
  int store_count, store_capacity;
  uint32_t* groups;  // of each thread: committed so far
};

SIMT_COLD Async& make_async(Block& block);

/// "the mbarrier at byte N of shared memory (initialised at file:line)"
struct MbarrierName {
  char text[256];
  explicit MbarrierName(const Mbarrier& bar);
};

SIMT_INLINE Mbarrier* look_for_mbarrier(Block& block, uint64_t offset) {
  for (int i = 0; block.async && i < block.async->mbarriers; ++i)
    if (block.async->mbarrier[i].offset == offset) return block.async->mbarrier + i;
  return nullptr;
}
/// The one at this address of the running block, or at the same place of another block's shared memory.
SIMT_INLINE Mbarrier& find_mbarrier(Block& block, const void* s_bar, Site site) {
  translate_shared(s_bar, 8, 8, Touch::atomic, site);
  uint64_t offset = shared_offset(s_bar);
  Mbarrier* bar = look_for_mbarrier(block, offset);
  if (!bar) [[unlikely]]
    fail(site, "the mbarrier at byte %llu of shared memory%s is not initialised (yet)",
         static_cast<unsigned long long>(offset), &block == machine.block ? "" : " of the other block");
  if (memcmp(block.shared + offset, MBARRIER_BYTES, 8)) [[unlikely]]
    fail(site, "something has been written over %s", MbarrierName(*bar).text);
  return *bar;
}
SIMT_COLD void watch_mbarrier(Block& block, const Mbarrier& bar, Access access, Site site);

/// Expects `arrivals` in each phase.
void mbarrier_init(void* s_bar, int arrivals, Site site = Site::here());

/// fence.mbarrier_init: so do the other blocks of the cluster.
void fence_mbarrier_init(Site site = Site::here());

bool has_waiters(const Mbarrier& bar);
/// Begins the next phase, if this one is over.
void finish_phase(Block& block, Mbarrier& bar, Site site);
/// `bytes` have been announced (positive), or have come.
inline void count_bytes(Mbarrier& bar, int64_t bytes) { bar.bytes += bytes, bar.filled = true; }

[[noreturn]] SIMT_COLD void fail_surplus(const Mbarrier& bar, Site site);
void arrive_at(Block& block, Mbarrier& bar, Site site);

void mbarrier_arrive(void* s_bar, Site site = Site::here());
/// Announces `bytes` to the phase under way.
void mbarrier_expect_tx(void* s_bar, int bytes, Site site = Site::here());
/// Announces `bytes`, then arrives.
void mbarrier_arrive_expect_tx(void* s_bar, int bytes, Site site = Site::here());

/// Waits until the phase of this parity is over. The phase before the first counts as over.
void mbarrier_wait(void* s_bar, uint32_t parity, Site site = Site::here());

/// What bulk copies under way will still bring. In bulk.cc.
SIMT_COLD int64_t bytes_under_way(const Block& block, const Mbarrier& bar);

/// A thread leaves; the last one leaves the block's mbarriers behind.
SIMT_COLD void check_copies_at_exit();

}  // namespace simt

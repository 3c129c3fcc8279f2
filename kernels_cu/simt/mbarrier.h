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

SIMT_COLD Async& make_async(Block& block) {
  if (!block.async) {
    block.async = static_cast<Async*>(zeroed(sizeof(Async)));
    block.async->groups = static_cast<uint32_t*>(zeroed(block.threads * sizeof(uint32_t)));
  }
  return *block.async;
}

/// "the mbarrier at byte N of shared memory (initialised at file:line)"
struct MbarrierName {
  char text[256];
  explicit MbarrierName(const Mbarrier& bar) {
    snprintf(text, sizeof text, "the mbarrier at byte %u of shared memory (initialised at %s:%d)", bar.offset,
             bar.init.name(), bar.init.line);
  }
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
SIMT_COLD void watch_mbarrier(Block& block, const Mbarrier& bar, Access access, Site site) {
  if (traced()) trace_lane(site, access, bar.offset, 0);
  if (!block.shadow) return;
  Touch touch = access == Access::mbarrier_init ? Touch::write : Touch::atomic;
  touch_chunk(block, bar.offset / 16, uint16_t(0xff << bar.offset % 16), touch, site);
}

/// Expects `arrivals` in each phase.
inline void mbarrier_init(void* s_bar, int arrivals, Site site = Site::here()) {
  constexpr int MOST = (1 << 20) - 1;
  Block& block = *machine.block;
  char* bytes = translate_shared(s_bar, 8, 8, Touch::write, site);
  uint32_t offset = uint32_t(shared_offset(s_bar));
  if (arrivals < 1 || arrivals > MOST)
    fail(site, "an mbarrier for %d arrivals: expected 1 to %d", arrivals, MOST);
  if (Mbarrier* before = look_for_mbarrier(block, offset))
    fail(site, "%s is initialised a second time", MbarrierName(*before).text);
  Async& async = make_async(block);
  if (async.mbarriers == MAX_COUNTERS || (block.clocks && block.clocks->counters == MAX_COUNTERS))
    fail(site, "more than %d mbarriers", MAX_COUNTERS);
  memcpy(bytes, MBARRIER_BYTES, 8);
  Mbarrier& bar = async.mbarrier[async.mbarriers++];
  Known arriving = bar.arriving, over = bar.over;  // their memory; of an epoch that has gone by
  arriving.epoch = over.epoch = 0;
  bar = {.offset = offset,
         .expected = arrivals,
         .pending = arrivals,
         .init = site,
         .init_thread = thread_number(),
         .arriving = arriving,
         .over = over};
  if (block.clocks) bar.counter = new_counter(*block.clocks, offset);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(block, bar, Access::mbarrier_init, site);
}

/// The async proxy knows of what this thread initialised.
SIMT_COLD void fence_mbarriers() {
  Async* async = machine.block->async;
  for (int i = 0; async && i < async->mbarriers; ++i)
    async->mbarrier[i].fenced |= async->mbarrier[i].init_thread == thread_number();
}
/// fence.mbarrier_init: so do the other blocks of the cluster.
inline void fence_mbarrier_init(Site site = Site::here()) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::fence, site);
  fence_mbarriers();
}

inline bool has_waiters(const Mbarrier& bar) {
  uint32_t any = 0;
  for (uint32_t slots : bar.waiting_slots) any |= slots;
  return any;
}
/// Begins the next phase, if this one is over.
inline void finish_phase(Block& block, Mbarrier& bar, Site site) {
  if (bar.pending || bar.bytes) return;
  if (bar.seen < bar.phase)
    fail(
        site,
        "phase %u of %s is over although nobody has waited for phase %u: a wait is missing before an arrival",
        bar.phase, MbarrierName(bar).text, bar.phase - 1);
  // NOTE: who arrives last knows of all arrivals, if of nothing that copies brought.
  if (block.clocks && !bar.filled) learn_count(*block.clocks, clock_number(), bar.counter, bar.phase + 1);
  ++bar.phase;
  if (has_waiters(bar)) bar.seen = bar.phase;
  bar.pending = bar.expected, bar.filled = false;
  Known released = bar.arriving;
  bar.arriving = bar.over, bar.over = released;
  bar.arriving.epoch = 0;
  for (int w = 0; w < block.warps; ++w) {
    block.warp[w].ready |= bar.waiting_slots[w];
    bar.waiting_slots[w] = 0;
  }
}
/// `bytes` have been announced (positive), or have come.
inline void count_bytes(Mbarrier& bar, int64_t bytes) { bar.bytes += bytes, bar.filled = true; }

inline void announce_bytes(Mbarrier& bar, int bytes, Site site) {
  constexpr int MOST = (1 << 20) - 1;
  if (bytes < 0 || bar.bytes + bytes > MOST)
    fail(site, "%d bytes announced to %s: expected at most %d in a phase", bytes, MbarrierName(bar).text,
         MOST);
  count_bytes(bar, bytes);
}
[[noreturn]] SIMT_COLD void fail_surplus(const Mbarrier& bar, Site site) {
  fail(site, "%lld bytes more than were announced have come to %s in phase %u",
       static_cast<long long>(-bar.bytes), MbarrierName(bar).text, bar.phase);
}
inline void arrive_at(Block& block, Mbarrier& bar, Site site) {
  if (!bar.pending)
    fail(site, "more arrivals at %s than the %d it expects in phase %u", MbarrierName(bar).text, bar.expected,
         bar.phase);
  if (block.clocks) release(*block.clocks, clock_number(), bar.arriving);
  if (--bar.pending) return;
  if (bar.bytes < 0) fail_surplus(bar, site);
  finish_phase(block, bar, site);
}

inline void mbarrier_arrive(void* s_bar, Site site = Site::here()) {
  Mbarrier& bar = find_mbarrier(*machine.block, s_bar, site);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(*machine.block, bar, Access::mbarrier_arrive, site);
  arrive_at(*machine.block, bar, site);
}
/// Announces `bytes` to the phase under way.
inline void mbarrier_expect_tx(void* s_bar, int bytes, Site site = Site::here()) {
  Mbarrier& bar = find_mbarrier(*machine.block, s_bar, site);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(*machine.block, bar, Access::mbarrier_arrive, site);
  announce_bytes(bar, bytes, site);
}
/// Announces `bytes`, then arrives.
inline void mbarrier_arrive_expect_tx(void* s_bar, int bytes, Site site = Site::here()) {
  Mbarrier& bar = find_mbarrier(*machine.block, s_bar, site);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(*machine.block, bar, Access::mbarrier_arrive, site);
  announce_bytes(bar, bytes, site);
  arrive_at(*machine.block, bar, site);
}

[[noreturn]] SIMT_COLD void fail_missed(const Mbarrier& bar, int64_t wanted, Site site) {
  char meant[48];
  snprintf(meant, sizeof meant, wanted < 0 ? "the phase before the first" : "phase %lld",
           static_cast<long long>(wanted));
  fail(site,
       "missed phase: this wait means %s of %s, but phase %u is already under way; arrivals did not wait "
       "for this thread",
       meant, MbarrierName(bar).text, bar.phase);
}
/// The phase that a thread means by its parity: with clocks, the one of that parity among the last that it
/// knows to be over and the one after it; else what the hardware would take it for.
inline int64_t meant_phase(const Mbarrier& bar, uint32_t parity, Site site) {
  int64_t next = bar.phase;
  if (Clocks* clocks = machine.block->clocks) next = known_count(*clocks, clock_number(), bar.counter);
  int64_t wanted = (next & 1) == parity ? next : next - 1;
  if (wanted + 1 < bar.phase) fail_missed(bar, wanted, site);
  return wanted;
}

/// Waits until the phase of this parity is over. The phase before the first counts as over.
inline void mbarrier_wait(void* s_bar, uint32_t parity, Site site = Site::here()) {
  step();
  Block& block = *machine.block;
  Mbarrier& bar = find_mbarrier(block, s_bar, site);
  if (parity > 1) [[unlikely]]
    fail(site, "parity %u: expected 0 or 1", parity);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(block, bar, Access::mbarrier_wait, site);
  int64_t wanted = meant_phase(bar, parity, site);
  if (bar.phase <= wanted) {
    Warp* warp = current->warp;
    bar.waiting_slots[warp - block.warp] |= current->slot_bit;
    bar.waited[warp - block.warp] = site;
    warp->ready &= ~current->slot_bit;
    wait();
    if (bar.phase > wanted + 1) fail_missed(bar, wanted, site);
  }
  if (bar.seen < wanted + 1) bar.seen = uint32_t(wanted + 1);
  if (!block.clocks) return;
  acquire(*block.clocks, clock_number(), bar.over);
  learn_count(*block.clocks, clock_number(), bar.counter, uint32_t(wanted + 1));
}

/// What bulk copies under way will still bring. In bulk.h.
SIMT_COLD int64_t bytes_under_way(const Block& block, const Mbarrier& bar);

SIMT_COLD void say_mbarrier_waits(const Block& block, const Warp& warp) {
  int w = int(&warp - block.warp);
  for (int i = 0; block.async && i < block.async->mbarriers; ++i) {
    const Mbarrier& bar = block.async->mbarrier[i];
    uint32_t lanes = 0;
    for (uint32_t slots = bar.waiting_slots[w]; slots; slots &= slots - 1)
      lanes |= 1u << warp.slots[__builtin_ctz(slots)].lane;
    if (!lanes) continue;
    say("\n  warp %d, lanes %08x wait at %s:%d for phase %u of %s, which lacks %d of %d arrivals", warp.id,
        lanes, bar.waited[w].name(), bar.waited[w].line, bar.phase, MbarrierName(bar).text, bar.pending,
        bar.expected);
    int64_t bytes = bar.bytes - bytes_under_way(block, bar);
    if (bytes > 0) say(" and %lld of the bytes announced", static_cast<long long>(bytes));
    if (bytes < 0) say(", with %lld bytes that nobody announced", static_cast<long long>(-bytes));
  }
}

/// A thread leaves; the last one leaves the block's mbarriers behind.
SIMT_COLD void check_copies_at_exit();

SIMT_COLD void finish_async() {
  check_copies_at_exit();
  Block& block = *machine.block;
  if (block.live) return;
  for (int i = 0; i < block.async->mbarriers; ++i) {
    const Mbarrier& bar = block.async->mbarrier[i];
    if (bar.bytes)
      fail(bar.init, "the block ends while %s %s %lld bytes in phase %u", MbarrierName(bar).text,
           bar.bytes > 0 ? "still expects" : "was brought, without their being announced,",
           static_cast<long long>(bar.bytes > 0 ? bar.bytes : -bar.bytes), bar.phase);
    if (bar.copied > bar.seen)
      fail(bar.copy, "nobody waited for the bulk copy issued here, which completes phase %u of %s",
           bar.copied - 1, MbarrierName(bar).text);
  }
  block.async->mbarriers = 0;
}

}  // namespace simt

#include "mbarrier.h"

#include <stdio.h>

namespace simt {

MbarrierName::MbarrierName(const Mbarrier& bar) {
  snprintf(text, sizeof text, "the mbarrier at byte %u of shared memory (initialised at %s:%d)", bar.offset,
           bar.init.name(), bar.init.line);
}

Async& make_async(Block& block) {
  if (!block.async) {
    block.async = static_cast<Async*>(zeroed(sizeof(Async)));
    block.async->groups = static_cast<uint32_t*>(zeroed(block.threads * sizeof(uint32_t)));
  }
  return *block.async;
}

void watch_mbarrier(Block& block, const Mbarrier& bar, Access access, Site site) {
  if (traced()) trace_lane(site, access, bar.offset, 0);
  if (!block.shadow) return;
  Touch touch = access == Access::mbarrier_init ? Touch::write : Touch::atomic;
  touch_chunk(block, bar.offset / 16, uint16_t(0xff << bar.offset % 16), touch, site);
}

void mbarrier_init(void* s_bar, int arrivals, Site site) {
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
void fence_mbarriers() {
  Async* async = machine.block->async;
  for (int i = 0; async && i < async->mbarriers; ++i)
    async->mbarrier[i].fenced |= async->mbarrier[i].init_thread == thread_number();
}

void fence_mbarrier_init(Site site) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::fence, site);
  fence_mbarriers();
}

bool has_waiters(const Mbarrier& bar) {
  uint32_t any = 0;
  for (uint32_t slots : bar.waiting_slots) any |= slots;
  return any;
}

void finish_phase(Block& block, Mbarrier& bar, Site site) {
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

static void announce_bytes(Mbarrier& bar, int bytes, Site site) {
  constexpr int MOST = (1 << 20) - 1;
  if (bytes < 0 || bar.bytes + bytes > MOST)
    fail(site, "%d bytes announced to %s: expected at most %d in a phase", bytes, MbarrierName(bar).text,
         MOST);
  count_bytes(bar, bytes);
}

void fail_surplus(const Mbarrier& bar, Site site) {
  fail(site, "%lld bytes more than were announced have come to %s in phase %u",
       static_cast<long long>(-bar.bytes), MbarrierName(bar).text, bar.phase);
}

void arrive_at(Block& block, Mbarrier& bar, Site site) {
  if (!bar.pending)
    fail(site, "more arrivals at %s than the %d it expects in phase %u", MbarrierName(bar).text, bar.expected,
         bar.phase);
  if (block.clocks) release(*block.clocks, clock_number(), bar.arriving);
  if (--bar.pending) return;
  if (bar.bytes < 0) fail_surplus(bar, site);
  finish_phase(block, bar, site);
}

void mbarrier_arrive(void* s_bar, Site site) {
  Mbarrier& bar = find_mbarrier(*machine.block, s_bar, site);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(*machine.block, bar, Access::mbarrier_arrive, site);
  arrive_at(*machine.block, bar, site);
}

void mbarrier_expect_tx(void* s_bar, int bytes, Site site) {
  Mbarrier& bar = find_mbarrier(*machine.block, s_bar, site);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(*machine.block, bar, Access::mbarrier_arrive, site);
  announce_bytes(bar, bytes, site);
}

void mbarrier_arrive_expect_tx(void* s_bar, int bytes, Site site) {
  Mbarrier& bar = find_mbarrier(*machine.block, s_bar, site);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(*machine.block, bar, Access::mbarrier_arrive, site);
  announce_bytes(bar, bytes, site);
  arrive_at(*machine.block, bar, site);
}

[[noreturn]] static SIMT_COLD void fail_missed(const Mbarrier& bar, int64_t wanted, Site site) {
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
static int64_t meant_phase(const Mbarrier& bar, uint32_t parity, Site site) {
  int64_t next = bar.phase;
  if (Clocks* clocks = machine.block->clocks) next = known_count(*clocks, clock_number(), bar.counter);
  int64_t wanted = (next & 1) == parity ? next : next - 1;
  if (wanted + 1 < bar.phase) fail_missed(bar, wanted, site);
  return wanted;
}

void mbarrier_wait(void* s_bar, uint32_t parity, Site site) {
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

void say_mbarrier_waits(const Block& block, const Warp& warp) {
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

void finish_async() {
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

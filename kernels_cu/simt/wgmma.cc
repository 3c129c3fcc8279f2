#include "wgmma.h"

#include "calls.h"
#include "flight.h"

namespace simt {

[[noreturn]] static SIMT_COLD void fail_divergent(const Wgmma& op, const WgmmaCall& call, Site site) {
  const uint3& t = op.first;
  const char* what = !(op.site == site)                      ? "call site"
                     : op.call.b != call.b                   ? "descriptor of B"
                     : op.call.a != call.a                   ? "descriptor of A"
                     : op.call.accumulate != call.accumulate ? "choice to accumulate"
                                                             : "shape";
  fail(site,
       "divergent wgmma: thread (%u,%u,%u) of the warpgroup is at %s:%d in the same one, with another %s",
       t.x, t.y, t.z, op.site.name(), op.site.line, what);
}

/// The place for a new wgmma.
static SIMT_COLD Wgmma& open_op(Warpgroup& w, const WgmmaCall& call, Site site) {
  Wgmma& op = op_number(w, w.opened);
  if (w.opened >= uint32_t(Warpgroup::OPS) && op.returned != WARPGROUP)
    fail(site, "more than %d wgmmas that their warpgroup has not waited for", Warpgroup::OPS);
  ++w.opened;
  op.call = call, op.site = site, op.arrived = op.returned = 0, op.flight = -1, op.knowing = false,
  op.first = current->thread_idx;
  int depth = depth_of(Element(call.element));
  if (call.n < 8 || call.n > WGMMA_MAX_N || call.n % 8)
    fail(site, "wgmma of m64n%dk%d: expected n a multiple of 8 up to 256", call.n, depth);
  if (!call.a_in_registers) checked_operand(call.a, 8, call.a_mn_major, "A", site);
  checked_operand(call.b, call.n / 8, call.b_mn_major, "B", site);
  if (call.a_in_registers && !op.a) {
    op.a = static_cast<uint32_t (*)[4]>(zeroed(WARPGROUP * sizeof *op.a));
    op.a_at = static_cast<const uint32_t**>(zeroed(WARPGROUP * sizeof *op.a_at));
  }
  memset(op.in_warp, 0, sizeof op.in_warp);
  return op;
}

/// Whether the last fence named these registers and they hold what they held then.
static bool fenced_as_they_are(const WgmmaThread& me, const void* at, size_t bytes) {
  const char *from = static_cast<const char*>(at), *held = me.held;
  for (int i = 0; i < me.named_count; held += me.named[i++].bytes) {
    size_t offset = size_t(from - static_cast<const char*>(me.named[i].at));
    if (offset + bytes <= me.named[i].bytes && offset < me.named[i].bytes)
      return !memcmp(held + offset, at, bytes);
  }
  return false;
}

[[noreturn]] static SIMT_COLD void fail_unfenced(const WgmmaThread& me, const char* which, Site site) {
  if (me.fenced)
    fail(site, "wgmma takes %s that changed since the wgmma_fence at %s:%d, or that it does not name", which,
         me.fence.name(), me.fence.line);
  if (me.wait.line)
    fail(site,
         "wgmma without a wgmma_fence since the wgmma_wait at %s:%d, after which its registers are free to "
         "use",
         me.wait.name(), me.wait.line);
  fail(site, "wgmma without a wgmma_fence before it");
}

/// What a warp knows as it comes to a wgmma; all four must know of a write that the tensor cores read.
/// NOTE: the last of its lanes speaks for the warp.
static SIMT_COLD void know_for_warp(Wgmma& op) {
  Clocks& c = *machine.block->clocks;
  int me = clock_number();
  if (!op.known) op.known = static_cast<uint32_t*>(zeroed(most_entries(c) * sizeof(uint32_t)));
  const Known& row = c.row[me];
  bool nothing = !row.clock || row.epoch != c.epoch;
  if (!op.knowing) memset(op.known, 0, most_entries(c) * sizeof(uint32_t));
  for (int i = 0; i < c.width; ++i) {
    uint32_t clock = i == me ? c.own[me] : nothing ? 0 : row.clock[i];
    if (!op.knowing || clock < op.known[i]) op.known[i] = clock;
  }
  op.knowing = true;
}

/// The running thread knows what all four warps know, and once more what it knew.
static SIMT_COLD void swap_known(Wgmma& op) {
  Clocks& c = *machine.block->clocks;
  uint32_t* row = now(c, c.row[clock_number()]);
  for (int i = 0; i < c.width; ++i) {
    uint32_t clock = row[i];
    row[i] = op.known[i], op.known[i] = clock;
  }
}

/// The last of 128 threads has brought its part of wgmma `number`.
static SIMT_COLD void watch_wgmma(Warpgroup& w, Wgmma& op, uint32_t number) {
  Block& block = *machine.block;
  SiteRow* row = nullptr;
  if (traced()) {
    if (int i = find_site(op.site, Access::wgmma); i >= 0) row = machine.launch.trace->sites + i;
    for (int i = 0; i < block.warps; ++i)
      if (block.warp[i].id / 4 == current->warp->id / 4) ++warp_traffic(block.warp[i]).step.mma;
    if (row) row->instructions += 4, row->lanes += WARPGROUP;
  }
  if (block.shadow) {
    if (w.counter < 0) w.counter = new_counter(*block.clocks, uint32_t(thread_number() / WARPGROUP));
    swap_known(op);
  }
  auto read = [&](uint64_t descriptor, int lines, bool mn_major, const char* which) {
    Operand o = checked_operand(descriptor, lines, mn_major, which, op.site);
    for_operand(o, [&](uint64_t at) {
      if (block.shadow) touch_counted(block, at, 16, Touch::wgmma_read, op.site, w.counter, number + 1);
      if (!row) return;
      row->bytes += 16;
      if (at < row->first) row->first = at;
      if (at + 16 > row->end) row->end = at + 16;
    });
    if (!row) return;
    int passes = operand_passes(o);
    row->wavefronts += passes, row->conflicts += passes - o.rows() * o.chunks() / 8;
  };
  if (!op.call.a_in_registers) read(op.call.a, 8, op.call.a_mn_major, "A");
  read(op.call.b, op.call.n / 8, op.call.b_mn_major, "B");
  if (block.shadow) swap_known(op);
}

void wgmma(const WgmmaCall& call, float* d, const uint32_t* a, Site site) {
  Warpgroup& w = own_warpgroup("wgmma", site);
  WgmmaThread& me = own_part(w);
  int thread = thread_number() % WARPGROUP;
  uint32_t number = me.issued++;
  bool first = number == w.opened;
  Wgmma& op = first ? open_op(w, call, site) : op_number(w, number);
  if (!first && (!(op.call == call) || !(op.site == site))) [[unlikely]]
    fail_divergent(op, call, site);
  if (first) op.flight = find_flight(w, call.n, d, op.chained, site);
  Flight& f = w.flight[op.flight];
  if (first) f.last = number;
  if (op.chained) {
    if (f.d[thread] != d) [[unlikely]]
      fail(site,
           "divergent wgmma: its accumulators are under way in thread (%u,%u,%u) and others are in this one",
           op.first.x, op.first.y, op.first.z);
  } else {
    if (!me.fenced || (call.accumulate && !fenced_as_they_are(me, d, call.n * 2))) [[unlikely]]
      fail_unfenced(me, "accumulators", site);
    f.d[thread] = d;
    if (call.accumulate) take_sums(f, d);
    hide_sums(d, call.n);
  }
  if (call.a_in_registers) {
    if (!fenced_as_they_are(me, a, 16)) [[unlikely]]
      fail_unfenced(me, "fragments of A", site);
    memcpy(op.a[thread], a, 16);
    op.a_at[thread] = a;
  }
  if (machine.launch.races && ++op.in_warp[thread / LANES] == LANES) [[unlikely]]
    know_for_warp(op);
  if (++op.arrived < WARPGROUP) return;
  ++machine.counters.wgmma;
  if (machine.watched) [[unlikely]]
    watch_wgmma(w, op, number);
  if (!machine.launch.copies_late) compute(w, op), ++w.completed;
  if (w.meeting.arrived) wake(w.meeting);  // who waits for it finds it complete
}

void wgmma_fence(const Registers* registers, int count, Site site) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::wgmma_fence, site);
  WgmmaThread& me = own_part(own_warpgroup("wgmma_fence", site));
  constexpr int MOST = sizeof me.named / sizeof *me.named;
  if (count > MOST) fail(site, "wgmma_fence of %d things: expected at most %d", count, MOST);
  me.fenced = true, me.fence = site, me.named_count = count, me.held_bytes = 0;
  for (int i = 0; i < count; ++i) {
    me.named[i] = registers[i];
    size_t end = me.held_bytes + registers[i].bytes;
    if (end > me.held_capacity) {
      me.held = static_cast<char*>(realloc(me.held, me.held_capacity = 2 * end));
      if (!me.held) abort();
    }
    memcpy(me.held + me.held_bytes, registers[i].at, registers[i].bytes);
    me.held_bytes = end;
  }
}

void wgmma_commit(Site site) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::wgmma_commit, site);
  Warpgroup& w = own_warpgroup("wgmma_commit", site);
  WgmmaThread& me = own_part(w);
  uint32_t group = me.committed++;
  if (group == w.groups) {
    grow(w.group_end, int(w.groups), w.group_capacity, 64);
    w.group_end[w.groups++] = me.issued;
  } else if (w.group_end[group] != me.issued) {
    fail(site, "divergent wgmma_commit: %u wgmmas precede it here, and %u in other threads of the warpgroup",
         me.issued, w.group_end[group]);
  }
}

/// A thread takes what a wgmma that is over gives it.
static void take_back(Warpgroup& w, uint32_t number) {
  Wgmma& op = op_number(w, number);
  int me = thread_number() % WARPGROUP;
  Flight& f = w.flight[op.flight];
  if (op.call.a_in_registers && memcmp(op.a[me], op.a_at[me], 16)) [[unlikely]]
    fail(op.site,
         "the fragments of A of this wgmma changed before its wait: keep them as they are until then");
  if (f.last == number) {
    if (!sums_are_hidden(f.d[me], f.n)) [[unlikely]]
      fail(op.site, "the accumulators of this wgmma were written before its wait");
    give_sums(f, f.d[me]);
    if (++f.returned == WARPGROUP) f.used = false;
  }
  ++op.returned;
}

void wgmma_wait(int allow, Site site) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::wgmma_wait, site);
  Warpgroup& w = own_warpgroup("wgmma_wait", site);
  WgmmaThread& me = own_part(w);
  int done = int(me.committed) - allow;
  if (done <= 0) return;
  uint32_t end = w.group_end[done - 1];
  if (end <= me.returned) return;
  while (op_number(w, end - 1).arrived < WARPGROUP)
    come_to(w.meeting, Access::wgmma_wait, 0, site), sleep_in(w.meeting);
  for (; w.completed < end; ++w.completed) compute(w, op_number(w, w.completed));
  while (me.returned < end) take_back(w, me.returned), ++me.returned;
  me.fenced = false, me.wait = site;
  if (machine.launch.races) learn_count(*machine.block->clocks, clock_number(), w.counter, end);
}

}  // namespace simt

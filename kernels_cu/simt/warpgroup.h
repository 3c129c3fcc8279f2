// warpgroup: what the 128 threads of four neighbouring warps share: products under way, registers, and calls
// in which all of them meet. The calls are in wgmma.h.
#pragma once
#include "watch.h"

namespace simt {

constexpr int WARPGROUP = 4 * LANES, MAX_WARPGROUPS = MAX_WARPS / 4;
constexpr int REGISTERS = 65536;  // of a multiprocessor

/// Registers as a call names them: accumulators or fragments of A, where they lie on a thread's stack.
struct Registers {
  const void* at;
  size_t bytes;
};

/// What all threads of a warpgroup must agree on in one wgmma.
struct WgmmaCall {
  uint64_t a, b;  // descriptors
  int n;
  int element;  // simt::Element
  bool a_in_registers, a_mn_major, b_mn_major, accumulate;
  bool operator==(const WgmmaCall&) const = default;
};

/// One wgmma, from the first thread that reaches it until all have waited for it.
struct Wgmma {
  WgmmaCall call;
  Site site;
  int arrived, returned, flight;
  uint3 first;            // the thread that came first
  bool chained, knowing;  // its accumulators were under way already; `known` is of this wgmma
  uint32_t (*a)[4];       // fragments of each thread as they came, and where they lie
  const uint32_t** a_at;
  uint8_t in_warp[4];  // lanes that have come
  uint32_t* known;     // what all four warps knew of others, for races (clock.h)
};

/// Accumulators that tensor cores work on; threads find poison in their place.
struct Flight {
  float* sums;  // see tensor.h
  int n, returned;
  uint32_t last;  // the newest wgmma that adds to them
  bool used;
  float* d[WARPGROUP];
};

/// One thread's part in its warpgroup's products. Numbers count from the block's start.
struct WgmmaThread {
  uint32_t issued, committed, returned;  // wgmmas, groups, wgmmas waited for
  bool fenced;                           // since it last waited
  Site fence, wait;
  Registers named[16];  // by the last fence, and what they held
  int named_count;
  char* held;
  size_t held_bytes, held_capacity;
};

struct WarpgroupMeeting {
  int arrived, value;
  Access kind;
  Site site;
  Warp* warp[4];
  uint32_t waiting_slots[4];
};

struct Warpgroup {
  static constexpr int OPS = 128, FLIGHTS = 16;
  int registers, wants;  // of a thread; what setmaxnreg waits for
  uint32_t opened, completed, groups;
  uint32_t* group_end;
  int group_capacity;
  int counter;  // in the clocks: how many products are over; -1: none yet
  WarpgroupMeeting meeting;
  Wgmma op[OPS];  // by number, round and round
  Flight flight[FLIGHTS];
  WgmmaThread thread[WARPGROUP];
};
struct Warpgroups {
  int free_registers;
  Warpgroup group[MAX_WARPGROUPS];
};

inline Wgmma& op_number(Warpgroup& w, uint32_t number) { return w.op[number % Warpgroup::OPS]; }
inline WgmmaThread& own_part(Warpgroup& w) { return w.thread[thread_number() % WARPGROUP]; }

/// Registers of a thread when a block starts: as many as so large a block can have.
inline int first_registers(const Block& block) {
  int most = REGISTERS / (block.warps * LANES) / 8 * 8;
  return most < 256 ? most : 256;
}
/// A new block begins: nothing is under way. Memory is kept.
inline void start_warpgroups(Block& block) {
  if (!block.warpgroups) return;
  Warpgroups& all = *block.warpgroups;
  all.free_registers = REGISTERS - first_registers(block) * block.warps * LANES;
  for (Warpgroup& w : all.group) {
    w.registers = first_registers(block);
    w.wants = 0, w.opened = w.completed = w.groups = 0, w.counter = -1;
    w.meeting = {};
    for (Wgmma& op : w.op) op.arrived = op.returned = 0, op.site = {};
    for (Flight& f : w.flight) f.used = false;
    for (WgmmaThread& t : w.thread)
      t.issued = t.committed = t.returned = 0, t.fenced = false, t.named_count = 0, t.wait = {};
  }
}
inline void free_warpgroups(Warpgroups* all) {
  if (!all) return;
  for (Warpgroup& w : all->group) {
    free(w.group_end);
    for (Wgmma& op : w.op) free(op.a), free(op.a_at), free(op.known);
    for (Flight& f : w.flight) free(f.sums);
    for (WgmmaThread& t : w.thread) free(t.held);
  }
  free(all);
}

SIMT_COLD const char* warpgroup_call(Access kind) {
  return kind == Access::wgmma_wait ? "wgmma_wait" : "setmaxnreg";
}

/// The part of a deadlock report about warpgroups.
SIMT_COLD void say_warpgroups(const Block& block) {
  for (int g = 0; block.warpgroups && g < MAX_WARPGROUPS; ++g) {
    const Warpgroup& w = block.warpgroups->group[g];
    const WarpgroupMeeting& m = w.meeting;
    if (!m.arrived) continue;
    say("\n  warpgroup %d, %d of 128 threads wait at %s:%d in %s", g, m.arrived, m.site.name(), m.site.line,
        warpgroup_call(m.kind));
    if (w.wants)
      say(" for %d registers a thread: it has %d, and %d of the block's %d are free", w.wants, w.registers,
          block.warpgroups->free_registers, REGISTERS);
    for (uint32_t i = w.completed; i < w.opened; ++i)
      if (const Wgmma& op = w.op[i % Warpgroup::OPS]; op.arrived < WARPGROUP)
        return say("; %d of them have reached the wgmma at %s:%d", op.arrived, op.site.name(), op.site.line);
  }
}

/// The running thread returns from the kernel: nothing of its warpgroup may miss it.
SIMT_COLD void leave_warpgroup() {
  Warpgroup& w = machine.block->warpgroups->group[thread_number() / WARPGROUP];
  WgmmaThread& me = own_part(w);
  if (me.issued < w.opened) {
    Wgmma& op = op_number(w, me.issued);
    fail(op.site, "a thread exited without the wgmma that %d threads of its warpgroup have reached",
         op.arrived);
  }
  if (me.returned < me.issued)
    fail(op_number(w, me.returned).site,
         "wgmma issued here was never waited for: commit its group, and wait before the thread ends");
  if (w.meeting.arrived)
    fail(w.meeting.site, "a thread exited while %d threads of its warpgroup wait for it in %s",
         w.meeting.arrived, warpgroup_call(w.meeting.kind));
}

}  // namespace simt

#include "warpgroup.h"

namespace simt {

/// Registers of a thread when a block starts: as many as so large a block can have.
static int first_registers(const Block& block) {
  int most = REGISTERS / (block.warps * LANES) / 8 * 8;
  return most < 256 ? most : 256;
}

void start_warpgroups(Block& block) {
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

void free_warpgroups(Warpgroups* all) {
  if (!all) return;
  for (Warpgroup& w : all->group) {
    free(w.group_end);
    for (Wgmma& op : w.op) free(op.a), free(op.a_at), free(op.known);
    for (Flight& f : w.flight) free(f.sums);
    for (WgmmaThread& t : w.thread) free(t.held);
  }
  free(all);
}

const char* warpgroup_call(Access kind) {
  return kind == Access::wgmma_wait ? "wgmma_wait" : "setmaxnreg";
}

void say_warpgroups(const Block& block) {
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

void leave_warpgroup() {
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

#include "warpgroup_calls.h"

namespace simt {

void wake(WarpgroupMeeting& m) {
  for (int i = 0; i < 4; ++i) {
    if (m.waiting_slots[i]) m.warp[i]->ready |= m.waiting_slots[i];
    m.waiting_slots[i] = 0;
  }
  m.arrived = 0;
}

/// Gives registers to the warpgroups that wait for some.
static SIMT_COLD void grant_registers(Block& block) {
  Warpgroups& all = *block.warpgroups;
  for (Warpgroup& w : all.group) {
    int more = (w.wants - w.registers) * WARPGROUP;
    if (!w.wants || more > all.free_registers) continue;
    all.free_registers -= more;
    w.registers = w.wants, w.wants = 0;
    wake(w.meeting);
  }
}

void setmaxnreg(int count, bool more, Site site) {
  const char* call = more ? "setmaxnreg.inc" : "setmaxnreg.dec";
  if (machine.watched) watch_call(Access::setmaxnreg, site);
  if (count < 24 || count > 256 || count % 8)
    fail(site, "%s to %d registers: expected a multiple of 8 from 24 to 256", call, count);
  Warpgroup& w = own_warpgroup(call, site);
  Block& block = *machine.block;
  if (more ? count < w.registers : count > w.registers)
    fail(site, "%s to %d registers, but a thread of warpgroup %d has %d", call, count,
         thread_number() / WARPGROUP, w.registers);
  if (come_to(w.meeting, Access::setmaxnreg, count, site)) {
    if (more) {
      w.wants = count;
    } else {
      block.warpgroups->free_registers += (w.registers - count) * WARPGROUP;
      w.registers = count;
      wake(w.meeting);
    }
    grant_registers(block);
    if (!w.wants) return;
  }
  sleep_in(w.meeting);
}

}  // namespace simt

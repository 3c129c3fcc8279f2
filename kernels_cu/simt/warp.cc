#include "warp.h"

namespace simt {

Rendezvous& open_rendezvous(Warp& warp, uint32_t mask, Access kind, Site site) {
  int lane = current->lane;
  if (!(mask >> lane & 1))
    fail(site, "%s with mask %08x, which does not name the calling lane %d", call_name(kind), mask, lane);
  if (uint32_t gone = mask & ~warp.live)
    fail(site, "%s with mask %08x, but lanes %08x of warp %d have exited", call_name(kind), mask, gone,
         warp.id);
  Rendezvous& r = warp.rendezvous[warp.open++];
  r.mask = mask, r.arrived = r.waiting_slots = 0, r.kind = kind, r.site = site;
  return r;
}

}  // namespace simt

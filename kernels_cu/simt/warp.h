// warp: calls in which lanes of a warp meet. Shuffles, votes, __syncwarp.
//
// A rendezvous is keyed by (warp, mask, call site). A lane leaves a pointer to its arguments and waits; the
// last lane named by the mask computes for all and makes them ready. So a masked subset meets correctly, two
// different calls never pair up, and a lane is suspended once a call.
#pragma once
#include "memory.h"

namespace simt {

constexpr uint32_t ALL = 0xffffffffu;

SIMT_COLD Rendezvous& open_rendezvous(Warp& warp, uint32_t mask, Access kind, Site site);

SIMT_INLINE Rendezvous& find_rendezvous(Warp& warp, uint32_t mask, Access kind, Site site) {
  for (int i = 0; i < warp.open; ++i) {
    Rendezvous& r = warp.rendezvous[i];
    if (r.mask != mask || !(r.site == site)) continue;
    if (r.kind != kind) [[unlikely]]
      fail(site, "%s meets %s of other lanes of its warp (mask %08x)", call_name(kind), call_name(r.kind),
           mask);
    if (!(mask >> current->lane & 1)) [[unlikely]]
      fail(site, "%s with mask %08x, which does not name the calling lane %d", call_name(kind), mask,
           current->lane);
    return r;
  }
  return open_rendezvous(warp, mask, kind, site);
}

/// Meets the other lanes of `mask`; the last to arrive runs op(arguments of each lane, mask).
template <class Op> SIMT_INLINE void meet(uint32_t mask, Access kind, void* arguments, Op op, Site site) {
  Fiber* me = current;
  Warp& warp = *me->warp;
  Rendezvous& r = find_rendezvous(warp, mask, kind, site);
  r.arguments[me->lane] = arguments;
  r.arrived |= 1u << me->lane;
  if (r.arrived != mask) {
    r.waiting_slots |= me->slot_bit;
    warp.ready &= ~me->slot_bit;
    wait();
    return;
  }
  op(r.arguments, mask);
  if (machine.watched) [[unlikely]]
    watch_meeting(warp, kind, mask, site);
  warp.ready |= r.waiting_slots;
  if (Rendezvous& last = warp.rendezvous[--warp.open]; &last != &r) [[unlikely]]
    r = last;
}

template <class T> struct Shuffle {
  T value, result;
  int source;
};

/// The value of `source_lane`, which must be in the mask.
template <class T> SIMT_INLINE T shfl(unsigned mask, T v, int source_lane, Site site = Site::here()) {
  Shuffle<T> mine{v, v, source_lane & (LANES - 1)};
  if (!(mask >> mine.source & 1)) [[unlikely]]
    fail(site, "shuffle from lane %d, which is not in the mask %08x", mine.source, mask);
  meet(
      mask, Access::shuffle, &mine,
      [](void** lanes, uint32_t all) {
        ++machine.counters.collectives;
        for (uint32_t left = all; left; left &= left - 1) {
          Shuffle<T>& to = *static_cast<Shuffle<T>*>(lanes[__builtin_ctz(left)]);
          to.result = static_cast<Shuffle<T>*>(lanes[to.source])->value;
        }
      },
      site);
  return mine.result;
}
template <class T> SIMT_INLINE T shfl_xor(unsigned mask, T v, int lane_mask, Site site = Site::here()) {
  return shfl(mask, v, current->lane ^ lane_mask, site);
}
/// As on the device, a lane without a source keeps its own value.
template <class T> SIMT_INLINE T shfl_down(unsigned mask, T v, int delta, Site site = Site::here()) {
  int source = current->lane + delta;
  return shfl(mask, v, source < LANES ? source : current->lane, site);
}
template <class T> SIMT_INLINE T shfl_up(unsigned mask, T v, int delta, Site site = Site::here()) {
  int source = current->lane - delta;
  return shfl(mask, v, source >= 0 ? source : current->lane, site);
}

/// The lanes of the mask whose predicate holds.
SIMT_INLINE unsigned ballot(unsigned mask, bool predicate, Site site = Site::here()) {
  unsigned vote = predicate;
  meet(
      mask, Access::vote, &vote,
      [](void** lanes, uint32_t all) {
        ++machine.counters.collectives;
        uint32_t votes = 0;
        for (uint32_t left = all; left; left &= left - 1) {
          int lane = __builtin_ctz(left);
          votes |= *static_cast<unsigned*>(lanes[lane]) << lane;
        }
        for (uint32_t left = all; left; left &= left - 1)
          *static_cast<unsigned*>(lanes[__builtin_ctz(left)]) = votes;
      },
      site);
  return vote;
}

SIMT_INLINE void syncwarp(unsigned mask = ALL, Site site = Site::here()) {
  meet(mask, Access::warp_barrier, nullptr, [](void**, uint32_t) { ++machine.counters.collectives; }, site);
}

}  // namespace simt

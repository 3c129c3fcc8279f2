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

SIMT_CALL Rendezvous& find_rendezvous(Warp& warp, uint32_t mask, Access kind, Site site);

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

SIMT_CALL void shfl_bytes(unsigned mask, void* result, const void* value, size_t bytes, int source_lane,
                          Site site);
/// The value of `source_lane`, which must be in the mask.
template <class T> SIMT_INLINE T shfl(unsigned mask, T v, int source_lane, Site site = Site::here()) {
  T result;
  shfl_bytes(mask, &result, &v, sizeof(T), source_lane, site);
  return result;
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
SIMT_CALL unsigned ballot(unsigned mask, bool predicate, Site site = Site::here());

SIMT_CALL void syncwarp(unsigned mask = ALL, Site site = Site::here());

}  // namespace simt

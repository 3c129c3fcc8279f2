// ticket: blocks that work on parts of one result, and the last of which puts them together.
//
// Each writes its part, fences, and takes a ticket with one of its threads; who gets the last one fences again
// and finds all parts in memory (CUDA C++ Programming Guide, "Memory Fence Functions").
#pragma once
#include "prim/arch.cuh"

/// What this thread wrote to global memory before is seen by whoever sees what it writes after. PTX
/// fence.acq_rel.gpu (membar.gl).
DEVICE void device_fence(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::fence(ONLY_AT_SITE);
#else
  __threadfence();
#endif
}

/// Takes one of `count` tickets; whether it was the last. The counter starts at 0, and is 0 again when all have
/// been taken. PTX atom.inc.
DEVICE bool take_ticket(int* counter, int count SITE) {
  const unsigned last = unsigned(count) - 1;
#if defined(CUATTN_SIMT)
  auto next = [last](unsigned taken) { return taken >= last ? 0u : taken + 1; };
  return simt::atomic_update(reinterpret_cast<unsigned*>(counter), next AT_SITE) == last;
#else
  return atomicInc(reinterpret_cast<unsigned*>(counter), last) == last;
#endif
}

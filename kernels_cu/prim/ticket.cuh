// ticket: blocks that work on parts of one result, and the last of which puts them together.
//
// Each writes its part and takes a ticket with one of its threads; who gets the last one finds all parts in
// memory, and so do the threads that meet it behind (PTX ISA, "Memory Consistency Model": causality order).
#pragma once
#include "prim/numbers.cuh"

/// Takes one of `count` tickets; whether it was the last. The counter starts at 0, and is 0 again when all have
/// been taken. What this thread wrote, or knew by a barrier to be written, is there for all who take a later
/// one. PTX atom.acq_rel.gpu.inc.
DEVICE bool take_ticket(int* counter, int count SITE) {
  const unsigned last = unsigned(count) - 1;
#if defined(CUATTN_SIMT)
  simt::fence(ONLY_AT_SITE);
  return unsigned(take_number(counter, count AT_SITE)) == last;
#else
  unsigned taken;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(taken) : "l"(counter), "r"(last) : "memory");
  return taken == last;
#endif
}

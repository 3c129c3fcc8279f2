// numbers: which of the blocks does what, where nobody knows beforehand how long each takes: who is free takes
// the next number.
#pragma once
#include "prim/arch.cuh"

/// The next of the numbers 0 to `count` − 1. The counter starts at 0, and is 0 again when all have been taken.
/// PTX atom.relaxed.gpu.inc.
DEVICE int take_number(int* counter, int count SITE) {
  const unsigned last = unsigned(count) - 1;
#if defined(CUATTN_SIMT)
  auto next = [last](unsigned taken) { return taken >= last ? 0u : taken + 1; };
  return int(simt::atomic_update(reinterpret_cast<unsigned*>(counter), next AT_SITE));
#else
  unsigned taken;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(taken) : "l"(counter), "r"(last) : "memory");
  return int(taken);
#endif
}

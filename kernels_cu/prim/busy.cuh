// busy: for how long each multiprocessor had a warp, as the warps stamp it themselves. Only builds that are
// made for this carry it (cuattn/busy.py): a kernel that stamps is slower, and its time is nobody's result.
#pragma once
#include "prim/arch.cuh"

#if defined(CUATTN_SIMT)
/// The SIMT machine has no multiprocessors.
struct Busy {
  Busy() {}
};
#else
/// A multiprocessor: since when it has a warp, for how long it had one in all, and how many it has now. Times
/// in ns of %globaltimer. The entry behind the last one holds the first and the last time of all.
struct SmTimes {
  uint64_t since, busy, warps, unused;
};
constexpr int MOST_SMS = 256;
__device__ SmTimes busy_sms[MOST_SMS + 1];

DEVICE uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
DEVICE uint32_t multiprocessor() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

/// Lives as long as a thread; the first lane speaks for its warp. NOTE: a warp that begins while the last one
/// of its multiprocessor ends may be seen too late by some ns; the interval between them then counts once.
struct Busy {
  METHOD Busy() {
    if (threadIdx.x % WARP != 0) return;
    SmTimes& sm = busy_sms[multiprocessor()];
    const uint64_t now = nanoseconds();
    if (atomicAdd(&sm.warps, uint64_t(1)) != 0) return;
    atomicExch(&sm.since, now);
    atomicMin(&busy_sms[MOST_SMS].since, now);
  }
  METHOD ~Busy() {
    if (threadIdx.x % WARP != 0) return;
    SmTimes& sm = busy_sms[multiprocessor()];
    const uint64_t since = atomicAdd(&sm.since, uint64_t(0)), now = nanoseconds();
    if (atomicAdd(&sm.warps, ~uint64_t(0)) != 1) return;
    atomicAdd(&sm.busy, now - since);
    atomicMax(&busy_sms[MOST_SMS].busy, now);
  }
};
#endif

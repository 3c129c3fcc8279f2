// mbarrier: barriers in shared memory that count arrivals and bytes (sm_90), in phases 0, 1, 2, …
//
// A phase is over when the expected number of threads has arrived and all announced bytes have come; the next
// one begins at once. A wait names its phase by the parity. So a ring of stages has two barriers a stage:
// `full`, which the producer's bytes complete and consumers wait for, and `empty`, the other way round. The
// n-th use of a stage waits for full with parity n % 2, and for empty with (n + 1) % 2: the phase before the
// first counts as over.
#pragma once
#include "prim/smem.cuh"

/// Eight bytes of shared memory that only these functions touch.
struct alignas(8) Mbarrier {
  uint64_t state;
};

/// Expects `arrivals` in each phase; once for each mbarrier. Other threads use it after a barrier, bulk
/// copies after fence_mbarrier_init. PTX mbarrier.init.
DEVICE void mbarrier_init(Mbarrier& s_bar, int arrivals SITE) {
#if defined(CUATTN_SIMT)
  simt::mbarrier_init(&s_bar, arrivals AT_SITE);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s_bar)), "r"(arrivals)
               : "memory");
#endif
}

/// Makes what this thread has initialised known to the other blocks of the cluster and to bulk copies. PTX
/// fence.mbarrier_init.
DEVICE void fence_mbarrier_init(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::fence_mbarrier_init(ONLY_AT_SITE);
#else
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Arrives; what this thread did before is ordered before the end of the phase. PTX mbarrier.arrive.
DEVICE void mbarrier_arrive(Mbarrier& s_bar SITE) {
#if defined(CUATTN_SIMT)
  simt::mbarrier_arrive(&s_bar AT_SITE);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&s_bar)) : "memory");
#endif
}

/// Announces `bytes` that copies will bring in this phase, and arrives. PTX mbarrier.arrive.expect_tx.
DEVICE void mbarrier_arrive_expect_tx(Mbarrier& s_bar, int bytes SITE) {
#if defined(CUATTN_SIMT)
  simt::mbarrier_arrive_expect_tx(&s_bar, bytes AT_SITE);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&s_bar)),
               "r"(bytes)
               : "memory");
#endif
}

/// Announces `bytes` without arriving. PTX mbarrier.expect_tx.
DEVICE void mbarrier_expect_tx(Mbarrier& s_bar, int bytes SITE) {
#if defined(CUATTN_SIMT)
  simt::mbarrier_expect_tx(&s_bar, bytes AT_SITE);
#else
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s_bar)),
               "r"(bytes)
               : "memory");
#endif
}

/// Waits until the phase of this parity is over; sees what was done before it ended. PTX
/// mbarrier.try_wait.parity.
DEVICE void mbarrier_wait(Mbarrier& s_bar, uint32_t parity SITE) {
#if defined(CUATTN_SIMT)
  simt::mbarrier_wait(&s_bar, parity AT_SITE);
#else
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra again;\n"
      "}" ::"r"(shared_address(&s_bar)),
      "r"(parity)
      : "memory");
#endif
}

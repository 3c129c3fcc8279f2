// proxy: shared memory has two sides. Loads, stores, ldmatrix and cp.async reach it by the generic proxy;
// wgmma and bulk copies by the async proxy, which does not see what the generic one wrote until the writer
// says so (sm_90).
#pragma once
#include "prim/smem.cuh"

#if defined(CUATTN_SIMT)
static const bool file_uses_async_proxy = simt::machine.async_proxy = true;
#endif

/// Makes what this thread has written to shared memory visible to wgmma and bulk copies; call it after the
/// writes and before the barrier that lets them start. PTX fence.proxy.async.
DEVICE void fence_proxy_async(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::fence_proxy_async(ONLY_AT_SITE);
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

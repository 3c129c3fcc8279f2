// cp_async: asynchronous 16-byte copies from global to shared memory (sm_80). They land when their thread
// waits for them; other threads see them after a barrier.
#pragma once
#include "prim/smem.cuh"

/// Copies 16 bytes, or fills them with zero and reads nothing where `valid` is false. PTX cp.async.cg.
DEVICE void cp_async16(void* s_to, const void* g_from, bool valid SITE) {
#if defined(CUATTN_SIMT)
  simt::cp_async(s_to, g_from, 16, valid ? 16 : 0 AT_SITE);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(s_to)),
               "l"(g_from), "r"(valid ? 16 : 0)
               : "memory");
#endif
}

/// Closes the group of copies issued since the last commit. PTX cp.async.commit_group.
DEVICE void cp_async_commit(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::cp_async_commit(ONLY_AT_SITE);
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most PENDING of this thread's groups are still in flight. PTX cp.async.wait_group.
template <int PENDING> DEVICE void cp_async_wait(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::cp_async_wait(PENDING AT_SITE);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

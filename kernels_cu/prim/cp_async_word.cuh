// cp_async_word: asynchronous copies of single words from global to shared memory; see cp_async.cuh.
#pragma once
#include "prim/smem.cuh"

/// Copies 4 bytes, or fills them with zero and reads nothing where `valid` is false. PTX cp.async.ca.
DEVICE void cp_async4(void* s_to, const void* g_from, bool valid SITE) {
#if defined(CUATTN_SIMT)
  simt::cp_async(s_to, g_from, 4, valid ? 4 : 0 AT_SITE);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(s_to)), "l"(g_from),
               "r"(valid ? 4 : 0)
               : "memory");
#endif
}

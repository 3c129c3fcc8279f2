// warpgroup: four neighbouring warps, which issue wgmma together, and what they may do to their registers
// (sm_90).
#pragma once
#include "prim/warp.cuh"
#if defined(CUATTN_SIMT)
#include "simt/warpgroup_calls.h"
#endif

constexpr int WARPGROUP = 128;

DEVICE int warpgroup_id() { return int(threadIdx.x) / WARPGROUP; }
DEVICE int warp_in_group() { return int(threadIdx.x) / WARP % 4; }

/// True in one lane of the warp, all of whose lanes call it; in each call in the same one, whichever that is.
/// PTX elect.sync.
DEVICE bool elect_one(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  return simt::elect_one(ONLY_AT_SITE);
#else
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
#endif
}

/// x, equal in all lanes of the warp, which the compiler learns by this: what follows from it is computed once
/// for the warp, in uniform registers. All lanes call it.
template <class T> DEVICE T warp_uniform(T x SITE) { return shuffle(x, 0 AT_SITE); }

/// x, of which the compiler does not know that it is x: what is computed from it anew is not kept in registers
/// until then.
DEVICE int computed_anew(int x) {
#if !defined(CUATTN_SIMT)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

/// Gives registers back: from here on a thread has COUNT, a multiple of 8 from 24 to 256. All warps of the
/// warpgroup call it. PTX setmaxnreg.dec.
template <int COUNT> DEVICE void setmaxnreg_dec(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::setmaxnreg(COUNT, false AT_SITE);
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

/// Takes registers that others have given back, and waits for them. PTX setmaxnreg.inc.
template <int COUNT> DEVICE void setmaxnreg_inc(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::setmaxnreg(COUNT, true AT_SITE);
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

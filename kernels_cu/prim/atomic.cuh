// atomic: numbers in global memory that blocks change together. Without a result, so that nobody waits.
#pragma once
#include "prim/arch.cuh"

/// *p += v. PTX red.global.add.f32.
DEVICE void atomic_add(float* p, float v SITE) {
#if defined(CUATTN_SIMT)
  simt::atomic_add(p, v AT_SITE);
#else
  atomicAdd(p, v);
#endif
}

/// *p = max(*p, v), neither of them NaN. NOTE: there is no such instruction for floats. As integers, positive
/// ones are ordered as they are and negative ones the other way round, as unsigned beside the positive ones.
DEVICE void atomic_max(float* p, float v SITE) {
#if defined(CUATTN_SIMT)
  simt::atomic_max(p, v AT_SITE);
#else
  if (__float_as_int(v) >= 0)
    atomicMax(reinterpret_cast<int*>(p), __float_as_int(v));
  else
    atomicMin(reinterpret_cast<unsigned*>(p), __float_as_uint(v));
#endif
}

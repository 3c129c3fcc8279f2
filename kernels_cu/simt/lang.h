// lang: what CUDA C++ expects of its compiler, for a C++20 host compiler. Includes all of the machine that
// a kernel sees.
//
// built with: -std=c++20 -O2 -fPIC -shared -w -ffp-contract=off -fno-strict-aliasing -fvisibility=hidden
//             -fno-exceptions -fno-rtti -fstack-clash-protection -DCUATTN_SIMT=1 -I kernels_cu, and linked
//             with machine.cc
// NOTE: no fused multiply-add and no -march: equal bits on every CPU of an architecture, and one shared
// object serves them all.
#pragma once
#include "launch.h"
#if !defined(SIMT_QUICK)
#include "calls.h"
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __grid_constant__
#define __restrict__ __restrict
#define __forceinline__ SIMT_INLINE
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __shared__ static_assert(false, "shared memory is one struct Smem, reached through prim/smem.cuh");

#define threadIdx (simt::current->thread_idx)
#define blockIdx (simt::machine.block->index)
#define blockDim (simt::machine.block_dim)
#define gridDim (simt::machine.grid_dim)
constexpr int warpSize = 32;

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
__forceinline__ int2 make_int2(int x, int y) { return {x, y}; }
__forceinline__ int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
__forceinline__ uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
__forceinline__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
__forceinline__ float2 make_float2(float x, float y) { return {x, y}; }
__forceinline__ float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- mathematics. NOTE: declared one by one; <cmath> costs a third of a second in every build.
#if defined(__GLIBC__)  // whose own declarations say noexcept, and must agree if they are there
#define SIMT_LIBM(...) extern "C" float __VA_ARGS__ noexcept
#else
#define SIMT_LIBM(...) extern "C" float __VA_ARGS__
#endif
SIMT_LIBM(expf(float));
SIMT_LIBM(exp2f(float));
SIMT_LIBM(logf(float));
SIMT_LIBM(log2f(float));
SIMT_LIBM(log1pf(float));
SIMT_LIBM(powf(float, float));
SIMT_LIBM(tanhf(float));
SIMT_LIBM(sinf(float));
SIMT_LIBM(cosf(float));
SIMT_LIBM(sqrtf(float));
SIMT_LIBM(fabsf(float));
SIMT_LIBM(floorf(float));
SIMT_LIBM(ceilf(float));
SIMT_LIBM(rintf(float));
SIMT_LIBM(fmaf(float, float, float));
#undef SIMT_LIBM
#if !defined(INFINITY)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#endif

namespace simt {
// As on the device, a NaN loses against a number. Compilers would call the library for these.
SIMT_INLINE float larger(float a, float b) { return a > b || b != b ? a : b; }
SIMT_INLINE float smaller(float a, float b) { return a < b || b != b ? a : b; }
}  // namespace simt
#define fmaxf simt::larger
#define fminf simt::smaller

__forceinline__ float max(float a, float b) { return fmaxf(a, b); }
__forceinline__ float min(float a, float b) { return fminf(a, b); }
template <class A, class B> __forceinline__ constexpr simt::common<A, B> max(A a, B b) {
  using T = simt::common<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B> __forceinline__ constexpr simt::common<A, B> min(A a, B b) {
  using T = simt::common<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
__forceinline__ float rsqrtf(float x) { return 1.f / sqrtf(x); }
__forceinline__ float __expf(float x) { return expf(x); }
__forceinline__ float __logf(float x) { return logf(x); }
__forceinline__ float __log2f(float x) { return log2f(x); }
__forceinline__ float __fdividef(float a, float b) { return a / b; }
__forceinline__ float __frcp_rn(float x) { return 1.f / x; }
// Macros, because some C++ libraries declare these names themselves in headers that others include.
#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)

template <class To, class From> __forceinline__ To simt_bits(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
__forceinline__ unsigned __float_as_uint(float x) { return simt_bits<unsigned>(x); }
__forceinline__ int __float_as_int(float x) { return simt_bits<int>(x); }
__forceinline__ float __uint_as_float(unsigned x) { return simt_bits<float>(x); }
__forceinline__ float __int_as_float(int x) { return simt_bits<float>(x); }
__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }

// ---- threads talking to each other, under their CUDA names
#define SIMT_SITE simt::Site site = simt::Site::here()
inline void __syncthreads(SIMT_SITE) { simt::block_barrier(site); }
inline void __syncwarp(unsigned mask = simt::ALL, SIMT_SITE) { simt::syncwarp(mask, site); }
inline void __threadfence(SIMT_SITE) { simt::fence(site); }
inline void __threadfence_block(SIMT_SITE) { simt::fence_block(site); }
[[noreturn]] inline void __trap(SIMT_SITE) { simt::trap("__trap()", site); }
template <class T> T __shfl_sync(unsigned mask, T v, int lane, SIMT_SITE) {
  return simt::shfl(mask, v, lane, site);
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int lanes, SIMT_SITE) {
  return simt::shfl_xor(mask, v, lanes, site);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, int delta, SIMT_SITE) {
  return simt::shfl_down(mask, v, delta, site);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, int delta, SIMT_SITE) {
  return simt::shfl_up(mask, v, delta, site);
}
inline unsigned __ballot_sync(unsigned mask, bool p, SIMT_SITE) { return simt::ballot(mask, p, site); }
inline bool __any_sync(unsigned mask, bool p, SIMT_SITE) { return simt::ballot(mask, p, site) != 0; }
inline bool __all_sync(unsigned mask, bool p, SIMT_SITE) { return simt::ballot(mask, p, site) == mask; }
#define SIMT_ATOMIC(cuda_name, name)                                               \
  template <class T> T cuda_name(T* p, simt::same<T> v, SIMT_SITE) {      \
    return simt::name(p, v, site);                                                 \
  }
SIMT_ATOMIC(atomicAdd, atomic_add)
SIMT_ATOMIC(atomicMax, atomic_max)
SIMT_ATOMIC(atomicMin, atomic_min)
SIMT_ATOMIC(atomicExch, atomic_exch)
#undef SIMT_ATOMIC
template <class T> T atomicCAS(T* p, simt::same<T> expected, simt::same<T> v, SIMT_SITE) {
  return simt::atomic_cas(p, expected, v, site);
}
#undef SIMT_SITE

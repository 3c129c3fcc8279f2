// num: 16-bit floats as storage, and the conversions kernels use. Both machines round to nearest even,
// bit for bit, NaN's payload aside.
#pragma once
#include "prim/arch.cuh"

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

template <class T> struct IsBfloat16 {
  static constexpr bool value = false;
};
template <> struct IsBfloat16<bfloat16> {
  static constexpr bool value = true;
};

#if defined(CUATTN_SIMT)
DEVICE uint16_t float16_bits(float x) {
  uint32_t u = __float_as_uint(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return uint16_t(sign | 0x7e00u);     // NaN
  if (mag >= 0x477ff000u) return uint16_t(sign | 0x7c00u);    // rounds past 65504
  if (mag < 0x33000001u) return uint16_t(sign);               // rounds to zero
  int shift = mag < 0x38800000u ? 126 - int(mag >> 23) : 13;  // subnormal halves keep fewer bits
  uint32_t full = mag < 0x38800000u ? (mag & 0x7fffffu) | 0x800000u : mag - 0x38000000u;
  uint32_t kept = full >> shift, rest = full & ((1u << shift) - 1u), tie = 1u << (shift - 1);
  return uint16_t(sign | (kept + (rest > tie || (rest == tie && (kept & 1u)))));
}
DEVICE uint16_t bfloat16_bits(float x) {
  uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
#endif

/// Two floats rounded to T, `lo` in the low half: one register of an mma fragment. PTX cvt.rn.f16x2.f32.
template <class T> DEVICE uint32_t pack2(float lo, float hi);
template <> METHOD uint32_t pack2<float16>(float lo, float hi) {
#if defined(CUATTN_SIMT)
  return float16_bits(lo) | (uint32_t(float16_bits(hi)) << 16);
#else
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
#endif
}
template <> METHOD uint32_t pack2<bfloat16>(float lo, float hi) {
#if defined(CUATTN_SIMT)
  return bfloat16_bits(lo) | (uint32_t(bfloat16_bits(hi)) << 16);
#else
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
#endif
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
DEVICE float to_float(float16 x) {
#if defined(CUATTN_SIMT)
  uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, mag = x.bits & 0x7fffu;
  if (mag >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (mag << 13));
  if (mag < 0x0400u)
    return __uint_as_float(sign | __float_as_uint(float(mag) * 5.9604644775390625e-8f));  // subnormal
  return __uint_as_float(sign | ((mag << 13) + 0x38000000u));
#else
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
  return r;
#endif
}

template <class T> DEVICE T from_float(float x) { return T{uint16_t(pack2<T>(x, 0.f))}; }
template <> METHOD float from_float<float>(float x) { return x; }

/// 2^x, exact at -inf (0). PTX ex2.approx.ftz.
DEVICE float exp2_fast(float x) {
#if defined(CUATTN_SIMT)
  return exp2f(x);
#else
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#endif
}

struct alignas(8) Pair {
  float a, b;
};

/// 16 bytes as eight 16-bit numbers: the unit of every copy.
struct alignas(16) Vec16 {
  uint32_t word[4];
};

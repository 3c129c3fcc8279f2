// byte: numbers of eight bits, int8 and e4m3, as float16 and from float32. Both machines agree bit for bit.
#pragma once
#include "prim/num.cuh"

/// Four exponent bits, three of mantissa, no infinity (OCP 8-bit floating point, 2023). NOTE: here a name alone:
/// they are moved as bytes.
struct float8_e4m3;

template <class T> struct IsByte {
  static constexpr bool value = sizeof(T) == 1;
};
template <> struct IsByte<float8_e4m3> {
  static constexpr bool value = true;
};
template <class T> struct IsE4m3 {
  static constexpr bool value = false;
};
template <> struct IsE4m3<float8_e4m3> {
  static constexpr bool value = true;
};

struct alignas(8) Vec8 {
  uint32_t word[2];
};

/// The bytes of `low` (0 … 3) and `high` (4 … 7) that SELECTOR's digits name, the lowest first. PTX prmt.
template <uint32_t SELECTOR> DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high) {
#if defined(CUATTN_SIMT)
  const uint64_t both = low | uint64_t(high) << 32;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= uint32_t(both >> (SELECTOR >> 4 * i & 7) * 8 & 255) << 8 * i;
  return r;
#else
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "n"(SELECTOR));
  return r;
#endif
}

/// a − b of two float16 each. PTX sub.rn.f16x2.
DEVICE uint32_t subtract_halves(uint32_t a, uint32_t b) {
#if defined(CUATTN_SIMT)
  auto number = [](uint32_t x) { return to_float(float16{uint16_t(x)}); };
  return pack2<float16>(number(a) - number(b), number(a >> 16) - number(b >> 16));
#else
  uint32_t r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#endif
}

#if defined(CUATTN_SIMT)
DEVICE float e4m3_value(uint32_t x) {
  const uint32_t magnitude = x & 0x7fu, sign = (x & 0x80u) << 24;
  if (magnitude == 0x7fu) return __uint_as_float(0x7fffffffu);
  if (magnitude < 8) return __uint_as_float(__float_as_uint(float(magnitude) / 512.f) | sign);
  return __uint_as_float(sign | ((magnitude << 20) + (120u << 23)));
}
#elif __CUDA_ARCH__ < 890
/// a b + c of two float16 each. PTX fma.rn.f16x2.
DEVICE uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
#endif
#if defined(CUATTN_SIMT) || __CUDA_ARCH__ < 890
/// Rounded to nearest even, ±448 beyond.
DEVICE uint32_t e4m3_bits(float x) {
  const uint32_t u = __float_as_uint(x), sign = u >> 24 & 0x80u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude < 0x3c800000u) return sign | uint32_t(rintf(fabsf(x) * 512.f));  // below 2⁻⁶ in steps of 2⁻⁹
  const uint32_t rounded = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  return sign | min(rounded, 0x7eu);
}
#endif

/// Two e4m3, the low or the HIGH ones of a word, as float16, which holds them all. PTX cvt.rn.f16x2.e4m3x2
/// (sm_89).
template <bool HIGH> DEVICE uint32_t halves_of_e4m3(uint32_t four) {
  const uint32_t two = HIGH ? four >> 16 : four;
#if defined(CUATTN_SIMT)
  return pack2<float16>(e4m3_value(two), e4m3_value(two >> 8));
#elif __CUDA_ARCH__ >= 890
  uint32_t r;
  if constexpr (HIGH)
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, b; }" : "=r"(r) : "r"(four));
  else
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a; }" : "=r"(r) : "r"(four));
  return r;
#else
  // In place they are 2⁸ too small. NOTE: 146 times as large, NaN's code alone is infinite, and 0 · ∞ is NaN.
  const uint32_t spread = permute_bytes<0x1404>(two, 0);
  const uint32_t small = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1), zero = 0x80008000u;
  return fma_halves(fma_halves(small, 0x78907890u, zero), 0, fma_halves(small, 0x5c005c00u, zero));
#endif
}

/// Two floats as e4m3, `low` in the low byte: rounded to nearest even, ±448 beyond. PTX
/// cvt.rn.satfinite.e4m3x2.f32 (sm_89).
DEVICE uint32_t e4m3_of(float low, float high) {
#if defined(CUATTN_SIMT) || __CUDA_ARCH__ < 890
  return e4m3_bits(low) | e4m3_bits(high) << 8;
#else
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
#endif
}

/// A float as int8: rounded to nearest even, −128 or 127 beyond, 0 for NaN. PTX cvt.rni.sat.s8.f32.
DEVICE uint32_t int8_of(float x) {
#if defined(CUATTN_SIMT)
  return x != x ? 0u : uint32_t(int(fminf(fmaxf(rintf(x), -128.f), 127.f))) & 255u;
#else
  uint32_t r;
  asm("{ .reg .s8 b; cvt.rni.sat.s8.f32 b, %1; cvt.u32.s8 %0, b; }" : "=r"(r) : "f"(x));
  return r & 255u;
#endif
}

/// Four numbers of a word as float16: the first two and the last two or, ACROSS, the even and the odd ones.
template <class T, bool ACROSS> DEVICE void widen(uint32_t (&halves)[2], uint32_t four) {
  if constexpr (IsE4m3<T>::value) {
    const uint32_t order = ACROSS ? permute_bytes<0x3120>(four, 0) : four;
    halves[0] = halves_of_e4m3<false>(order);
    halves[1] = halves_of_e4m3<true>(order);
  } else {
    // As 0 … 255 a byte is a mantissa: 0x6400 + x is the float16 1024 + x.
    const uint32_t biased = four ^ 0x80808080u, exponent = 0x64646464u, bias = 0x64806480u;
    halves[0] = subtract_halves(permute_bytes<ACROSS ? 0x4240 : 0x4140>(biased, exponent), bias);
    halves[1] = subtract_halves(permute_bytes<ACROSS ? 0x4341 : 0x4342>(biased, exponent), bias);
  }
}

/// Four floats as T, the first in the lowest byte.
template <class T> DEVICE uint32_t narrow(float a, float b, float c, float d) {
  if constexpr (IsE4m3<T>::value)
    return e4m3_of(a, b) | e4m3_of(c, d) << 16;
  else
    return int8_of(a) | int8_of(b) << 8 | int8_of(c) << 16 | int8_of(d) << 24;
}

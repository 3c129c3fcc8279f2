// softcap: scores that saturate, cap · tanh(σ s / cap) for σ s (Gemma 2, Grok-1).
#pragma once
#include "prim/acc.cuh"

/// The smaller, the larger; NaN where either is. PTX min.NaN.f32, max.NaN.f32.
DEVICE float min_or_nan(float a, float b) {
#if defined(CUATTN_SIMT)
  return a != a ? a : b < a || b != b ? b : a;
#else
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#endif
}
DEVICE float max_or_nan(float a, float b) {
#if defined(CUATTN_SIMT)
  return a != a ? a : b > a || b != b ? b : a;
#else
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#endif
}

/// 1/x. PTX rcp.approx.ftz.
DEVICE float reciprocal_fast(float x) {
#if defined(CUATTN_SIMT)
  return 1.f / x;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#endif
}

/// tanh x, within 5·10⁻⁷ of itself, as a ratio of polynomials: the coefficients are Eigen's (ptanh).
/// NOTE: a score's error is that times the score. tanh.approx is off by 2⁻¹¹, at a cap of 50 by 2 % of a
/// weight; what is made of e^2x loses small x beside 1, and takes two instructions of the unit that
/// exponentials need.
DEVICE float tanh_ratio(float x) {
  x = max_or_nan(min_or_nan(x, 7.90531110763549805f), -7.90531110763549805f);  // beyond, 1 in float32
  const float y = x * x;
  float p = -2.76076847742355e-16f;
  p = p * y + 2.00018790482477e-13f;
  p = p * y - 8.60467152213735e-11f;
  p = p * y + 5.12229709037114e-08f;
  p = p * y + 1.48572235717979e-05f;
  p = p * y + 6.37261928875436e-04f;
  p = p * y + 4.89352455891786e-03f;
  float q = 1.19825839466702e-06f;
  q = q * y + 1.18534705686654e-04f;
  q = q * y + 2.26843463243900e-03f;
  q = q * y + 4.89352518554385e-03f;
  return x * p * reciprocal_fast(q);
}

/// Scores s become tanh(s · squash), with squash = σ / cap: the softmax then takes `cap` for its σ.
template <class Acc> DEVICE void cap_scores(Acc& r_s, float squash) {
  for_pairs(r_s, [&](int, int, float& a, float& b) {
    a = tanh_ratio(a * squash), b = tanh_ratio(b * squash);
  });
}

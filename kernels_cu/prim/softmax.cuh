// softmax: the online softmax (Milakov & Gimelshein 2018). The only one in the repository.
//
// A row's state is (m, l): the largest score seen and Σ e^{σ(s − m)}. When m grows, everything summed under
// the old m is multiplied by e^{σ(m_old − m_new)}. Exponentials are taken to base 2, with σ₂ = σ·log₂e.
//
// NOTE: s − m is taken before it is scaled. The usual σ₂s − σ₂m is one fma, but rounds σ₂m alone: at logits
// of 3·10⁴ the largest weight is then 2^±0.002 instead of 1, which shows in float16. FUSED is that fma, for
// warps none of whose |σ₂m| is beyond FUSED_UP_TO.
#pragma once
#include "prim/mma.cuh"

/// Up to here the rounding of σ₂m changes a sum by less than the float32 of its logarithm shows.
constexpr float FUSED_UP_TO = 64.f;

struct SoftmaxRow {
  float m, l;
  METHOD SoftmaxRow() : m(-INFINITY), l(0.f) {}
  METHOD SoftmaxRow(float m, float l) : m(m), l(l) {}

  /// The maximum to subtract. NOTE: a row that has seen no key keeps m = -inf; only the exponent uses 0 in
  /// its place, so a first tile that is wholly masked leaves no trace.
  METHOD float pivot() const { return m == -INFINITY ? 0.f : m; }

  /// Covers scores up to `top`; returns the factor for what was summed before.
  METHOD float raise(float top, float sigma2) {
    float before = m;
    m = fmaxf(m, top);
    float rescale = exp2_fast((before - pivot()) * sigma2);
    l *= rescale;
    return rescale;
  }
  /// e^{σ(s − m)}.
  METHOD float weight(float s, float sigma2) const { return exp2_fast((s - pivot()) * sigma2); }

  /// Takes in a state whose maximum may differ; returns the factors for what either has summed. Two empty
  /// states stay empty.
  struct Factors {
    float mine, theirs;
  };
  METHOD Factors merge(const SoftmaxRow& other, float sigma2) {
    float mine = raise(other.m, sigma2), theirs = exp2_fast((other.m - pivot()) * sigma2);
    l += other.l * theirs;
    return {mine, theirs};
  }
  /// 1/l, and 0 for a row without keys, whose output is 0.
  METHOD float inverse_sum() const { return l == 0.f ? 0.f : 1.f / l; }
  /// ln Σ e^{σ s}; -inf without keys.
  METHOD float lse(float sigma) const { return l == 0.f ? -INFINITY : m * sigma + logf(l); }
};

/// Merges the states of all lanes; every lane gets the result, in the same bits.
DEVICE SoftmaxRow merge_lanes(SoftmaxRow row, float sigma2 SITE) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    SoftmaxRow other;
    other.m = shuffle_xor(row.m, distance AT_SITE);
    other.l = shuffle_xor(row.l, distance AT_SITE);
    row.merge(other, sigma2);
  }
  return row;
}

/// The states of the rows that a warp's accumulator holds: two a tile row for each lane, shared by the quad.
template <int ROWS, bool FUSED = false> struct Softmax {
  static constexpr int M_TILES = ROWS / MMA_M;
  SoftmaxRow row[M_TILES][2];

  /// Turns scores into weights in place, adds them to l, and rescales the output accumulated so far.
  /// NOTE: l stays a partial sum of each lane until `finish`; only m must agree in the quad at every step.
  template <class AccS, class AccO> METHOD void update(AccS& r_s, AccO& r_o, float sigma2 SITE) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < AccS::N_TILES; ++n)
          top = fmaxf(top, fmaxf(r_s.tile[m][n][2 * half], r_s.tile[m][n][2 * half + 1]));
        SoftmaxRow& state = row[m][half];
        float rescale = state.raise(quad_max(top AT_SITE), sigma2), pivot = state.pivot();
        float first = FUSED ? 0.f : pivot, then = FUSED ? pivot * sigma2 : 0.f;  // what is taken away, and when
        if (FUSED && warp_any(fabsf(then) > FUSED_UP_TO AT_SITE)) {
          then = 0.f;
#pragma unroll
          for (int n = 0; n < AccS::N_TILES; ++n)
            r_s.tile[m][n][2 * half] -= pivot, r_s.tile[m][n][2 * half + 1] -= pivot;
        }
#pragma unroll
        for (int n = 0; n < AccS::N_TILES; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            r_s.tile[m][n][e] = exp2_fast((r_s.tile[m][n][e] - first) * sigma2 - then);
            state.l += r_s.tile[m][n][e];
          }
#pragma unroll
        for (int n = 0; n < AccO::N_TILES; ++n)
          r_o.tile[m][n][2 * half] *= rescale, r_o.tile[m][n][2 * half + 1] *= rescale;
      }
  }

  /// Completes l over the quad.
  METHOD void finish(SITE_ONLY) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
      row[m][0].l = quad_sum(row[m][0].l AT_SITE), row[m][1].l = quad_sum(row[m][1].l AT_SITE);
  }

  /// O / l.
  template <class AccO> METHOD void normalise(AccO& r_o) const {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float inverse = row[m][half].inverse_sum();
#pragma unroll
        for (int n = 0; n < AccO::N_TILES; ++n)
          r_o.tile[m][n][2 * half] *= inverse, r_o.tile[m][n][2 * half + 1] *= inverse;
      }
  }
};

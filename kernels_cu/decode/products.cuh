// products: Q Kᵀ and P V of decode over a cache of 16-bit floats, or of bytes with scales (prim/quantised.cuh).
//
//   S = (q · k) k_scale      O = Σ p v v_scale
//
// Bytes become float16, and so does Q, whatever it was. k_scale is multiplied into the scores, v_scale into O
// or, where each page has its own, into the weights. These are rounded to float16 as 2¹⁵ p, so that many of
// 2⁻³⁹ and more still count; O's store takes it back. NOTE: a weight of 1 stays what it is, but 1 · v_scale does
// not, and where Q is float16 as coarse as O, that shows: such weights are the sum of two float16.
#pragma once
#include "prim/cp_async_word.cuh"
#include "prim/quantised.cuh"
#include "prim/scales.cuh"
#include "prim/scan.cuh"
#include "prim/softmax.cuh"

/// Of a tile's keys, where pages have their own.
template <int KEYS, bool PAGES> struct KeyScales {
  METHOD void start_loading(const Scales&, int64_t, bool) {}
};
template <int KEYS> struct KeyScales<KEYS, true> {
  float k_scale[KEYS], v_scale[KEYS];

  /// By the lane that has a key, whose scales lie at `place`; those of no key become 0.
  METHOD void start_loading(const Scales& scales, int64_t place, bool valid SITE) {
    if (lane_id() >= KEYS) return;
    cp_async4(k_scale + lane_id(), scales.g_k + place, valid AT_SITE);
    cp_async4(v_scale + lane_id(), scales.g_v + place, valid AT_SITE);
  }
};

/// Over a cache of Q's own type T.
template <class T> struct FloatProducts {
  METHOD FloatProducts(const Scales&, int) {}
  template <class Queries> METHOD void take(Queries&) {}
  template <class AccS, class Queries, class Tile>
  METHOD void scores(AccS& r_s, const Queries& q, const Tile& tile SITE) const {
    multiply_abt<T>(r_s, q, 0, tile.k AT_SITE);
  }
  template <class State, class AccS, class AccO>
  METHOD void weigh(State& softmax, AccS& r_s, AccO& r_o, float sigma2 SITE) const {
    softmax.update(r_s, r_o, sigma2 AT_SITE);
  }
  template <class AccO, class AccS, class Tile>
  METHOD void output(AccO& r_o, AccS& r_s, const Tile& tile SITE) const {
    multiply_ab<T>(r_o, r_s, tile.v AT_SITE);
  }
  METHOD float o_scale() const { return 1.f; }
  /// What a lane has of a row of O, times a factor, to shared memory.
  template <class AccO> static METHOD void store(float* s_row, const AccO& r_o, int half, float factor SITE) {
#pragma unroll
    for (int n = 0; n < r_o.N_TILES; ++n)
      store_shared(reinterpret_cast<Pair*>(s_row + r_o.col(n, 0)),
                   Pair{r_o.tile[0][n][2 * half] * factor, r_o.tile[0][n][2 * half + 1] * factor} AT_SITE);
  }
};

/// Takes an accumulator's place in `Softmax::update`, to learn by what a lane's two rows are to be multiplied.
struct Rescale {
  static constexpr int N_TILES = 1;
  float tile[1][1][4] = {{{1.f, 1.f, 1.f, 1.f}}};

  METHOD bool needed() const { return tile[0][0][0] != 1.f || tile[0][0][2] != 1.f; }
};

/// Over a cache of bytes of type T.
template <class T, int KIND> struct ByteProducts {
  static constexpr bool PAGES = KIND == SCALES_PAGES;
  static constexpr int TERMS = PAGES && !IsBfloat16<Element>::value ? 2 : 1;  // of a weight
  static constexpr float UNIT = 32768.f;  // the float16 that a weight of 1 becomes
  float k, v;    // the scale of all keys; of pages, v is a power of two that none of the stretch has exceeded
  float weight;  // what weights are multiplied by
  float row[2];  // what the scores of a lane's rows are multiplied by

  METHOD ByteProducts(const Scales& scales, int hkv SITE) : k(scales.k), v(scales.v), weight(UNIT) {
    if constexpr (!PAGES) k = scales.of_k<KIND>(0, hkv, 0 AT_SITE), v = scales.of_v<KIND>(0, hkv, 0 AT_SITE);
  }
  /// Q of a new stretch.
  template <class Queries> METHOD void take(Queries& q SITE) {
    take_rows<Element>(q.rows, row AT_SITE);
    if constexpr (PAGES)
      v = weight = 0.f;
    else
      row[0] *= k, row[1] *= k;
  }
  template <class AccS, class Queries, class Tile>
  METHOD void scores(AccS& r_s, const Queries& q, const Tile& tile SITE) const {
    multiply_abt_bytes<T>(r_s, q, tile.k AT_SITE);
#pragma unroll
    for (int n = 0; n < AccS::N_TILES; ++n) {
      Pair of_key{1.f, 1.f};
      if constexpr (PAGES) of_key = scales_of(tile.k_scale, AccS::col(n, 0) AT_SITE);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        r_s.tile[0][n][2 * half] *= row[half] * of_key.a;
        r_s.tile[0][n][2 * half + 1] *= row[half] * of_key.b;
      }
    }
  }
  /// NOTE: of many keys few raise the maximum, and without one O stays as it is.
  template <class State, class AccS, class AccO>
  METHOD void weigh(State& softmax, AccS& r_s, AccO& r_o, float sigma2 SITE) const {
    Rescale rescale;
    softmax.update(r_s, rescale, sigma2 AT_SITE);
    if (!warp_any(rescale.needed() AT_SITE)) return;
#pragma unroll
    for (int n = 0; n < AccO::N_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) r_o.tile[0][n][e] *= rescale.tile[0][0][e];
  }
  template <class AccO, class AccS, class Tile>
  METHOD void output(AccO& r_o, AccS& r_s, const Tile& tile SITE) {
    if constexpr (PAGES) raise(r_o, tile.v_scale AT_SITE);
#pragma unroll
    for (int n = 0; n < AccS::N_TILES; ++n) {
      Pair of_key{1.f, 1.f};
      if constexpr (PAGES) of_key = scales_of(tile.v_scale, AccS::col(n, 0) AT_SITE);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        r_s.tile[0][n][2 * half] *= weight * of_key.a;
        r_s.tile[0][n][2 * half + 1] *= weight * of_key.b;
      }
    }
    multiply_ab_bytes<T, TERMS>(r_o, r_s, tile.v AT_SITE);
  }
  METHOD float o_scale() const { return v / UNIT; }
  template <class AccO> static METHOD void store(float* s_row, const AccO& r_o, int half, float factor SITE) {
#pragma unroll
    for (int n = 0; n < AccO::N_TILES; n += 2)
      store_shared(reinterpret_cast<Vec16*>(s_row + first_column(n)),
                   four_columns(r_o, n, half, factor) AT_SITE);
  }

  static METHOD Pair scales_of(const float* s_scale, int col SITE) {
    return load_shared(reinterpret_cast<const Pair*>(s_scale + col) AT_SITE);
  }
  /// Covers a tile's scales of V: one beyond what O has been summed under makes that smaller.
  template <class AccO, int KEYS> METHOD void raise(AccO& r_o, const float (&s_scale)[KEYS] SITE) {
    float top = load_shared(s_scale + lane_id() % KEYS AT_SITE);
    if (!warp_any(top > v AT_SITE)) return;
    top = warp_max(top AT_SITE);
    const float now = __uint_as_float((__float_as_uint(top) + 0x7fffffu) & 0x7f800000u), rescale = v / now;
    v = now, weight = UNIT / now;
#pragma unroll
    for (int n = 0; n < AccO::N_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) r_o.tile[0][n][e] *= rescale;
  }
};

template <class T, int KIND, bool BYTES> struct ProductsOf {
  using type = FloatProducts<T>;
};
template <class T, int KIND> struct ProductsOf<T, KIND, true> {
  using type = ByteProducts<T, KIND>;
};

// scales: of a cache of bytes (byte.cuh), whose numbers stand for themselves times a scale of K or of V.
#pragma once
#include "prim/byte.cuh"
#include "prim/gmem.cuh"

/// How many there are: one, one a KV head, or one for each page's part of a KV head.
enum { SCALES_ONE, SCALES_HEADS, SCALES_PAGES };

/// Numbers, or arrays [HKV] or [num_pages, HKV].
struct Scales {
  const float *g_k, *g_v;
  float k, v;

  template <int KIND> METHOD float of_k(int page, int hkv, int HKV SITE) const {
    return of<KIND>(g_k, k, page, hkv, HKV AT_SITE);
  }
  template <int KIND> METHOD float of_v(int page, int hkv, int HKV SITE) const {
    return of<KIND>(g_v, v, page, hkv, HKV AT_SITE);
  }
  template <int KIND> static METHOD float of(const float* g, float one, int page, int hkv, int HKV SITE) {
    if (KIND == SCALES_ONE) return one;
    return load_global(g + (KIND == SCALES_PAGES ? int64_t(page) * HKV : 0) + hkv AT_SITE);
  }
};

/// What a View of a cache of T counts in: 16-bit floats, or bytes.
template <class T, bool BYTES = IsByte<T>::value> struct CellOf {
  using type = T;
};
template <class T> struct CellOf<T, true> {
  using type = uint8_t;
};
template <class T> using Cell = typename CellOf<T>::type;

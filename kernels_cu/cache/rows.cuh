// rows: numbers of new rows as a cache of type T takes them: 16-bit floats as they are; as bytes divided by a
// scale, in float32, and rounded once.
#pragma once
#include "prim/scales.cuh"

/// Eight numbers, copied.
template <class T, class Element> DEVICE void copy_eight(Cell<T>* to, const Element* from, float scale SITE) {
  const Vec16 eight = load_global(reinterpret_cast<const Vec16*>(from) AT_SITE);
  if constexpr (!IsByte<T>::value) {
    store_global(reinterpret_cast<Vec16*>(to), eight AT_SITE);
  } else {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(Element{uint16_t(eight.word[i / 2] >> i % 2 * 16)}) / scale;
    store_global(reinterpret_cast<Vec8*>(to),
                 Vec8{{narrow<T>(x[0], x[1], x[2], x[3]), narrow<T>(x[4], x[5], x[6], x[7])}} AT_SITE);
  }
}

/// Two neighbours.
template <class T> DEVICE void store_two(Cell<T>* to, float a, float b, float scale SITE) {
  if constexpr (IsByte<T>::value)
    store_global(reinterpret_cast<uint16_t*>(to), uint16_t(narrow<T>(a / scale, b / scale, 0, 0)) AT_SITE);
  else
    store_pair(to, a, b AT_SITE);
}

/// Two neighbours, copied.
template <class T, class Element> DEVICE void copy_two(Cell<T>* to, const Element* from, float scale SITE) {
  if constexpr (IsByte<T>::value) {
    const Pair two = load_pair(from AT_SITE);
    store_two<T>(to, two.a, two.b, scale AT_SITE);
  } else {
    const uint32_t two = load_global(reinterpret_cast<const uint32_t*>(from) AT_SITE);
    store_global(reinterpret_cast<uint32_t*>(to), two AT_SITE);
  }
}

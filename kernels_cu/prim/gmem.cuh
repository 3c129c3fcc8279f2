// gmem: global memory. Kernels dereference it only here, so that the CPU machine counts and checks every
// byte.
#pragma once
#include "prim/num.cuh"

/// A strided array in global memory whose last dimension is contiguous. Strides in elements, 64-bit: offsets
/// are widened before they are multiplied, so arrays past 2³¹ elements are plain arrays.
template <class T, int RANK> struct View {
  T* data;
  int64_t stride[RANK - 1];

  /// Address of the first element at the given leading indices; those left out are 0.
  template <class... Index> METHOD T* at(Index... index) const {
    static_assert(sizeof...(Index) < RANK, "the last dimension is contiguous: add to the address");
    const int64_t along[] = {int64_t(index)...};
    int64_t offset = 0;
#pragma unroll
    for (int i = 0; i < int(sizeof...(Index)); ++i) offset += along[i] * stride[i];
    return data + offset;
  }
};

template <class T> DEVICE T load_global(const T* p SITE) {
#if defined(CUATTN_SIMT)
  return simt::load_global(p AT_SITE);
#else
  return *p;
#endif
}

template <class T> DEVICE void store_global(T* p, T v SITE) {
#if defined(CUATTN_SIMT)
  simt::store_global(p, v AT_SITE);
#else
  *p = v;
#endif
}

/// 16 bytes that will not be read again: evict first. PTX ld.global.cs.v4.
DEVICE Vec16 load_global_streaming(const Vec16* p SITE) {
#if defined(CUATTN_SIMT)
  return simt::load_global(p AT_SITE);
#else
  Vec16 v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p));
  return v;
#endif
}

/// Two neighbouring numbers, rounded to T, in one store.
template <class T> DEVICE void store_pair(T* p, float a, float b SITE) {
  if constexpr (sizeof(T) == 4)
    store_global(reinterpret_cast<Pair*>(p), Pair{a, b} AT_SITE);
  else
    store_global(reinterpret_cast<uint32_t*>(p), pack2<T>(a, b) AT_SITE);
}

/// Two neighbouring numbers in one load.
DEVICE Pair load_pair(const float* p SITE) { return load_global(reinterpret_cast<const Pair*>(p) AT_SITE); }
template <class T> DEVICE Pair load_pair(const T* p SITE) {
  uint32_t both = load_global(reinterpret_cast<const uint32_t*>(p) AT_SITE);
  return Pair{to_float(T{uint16_t(both)}), to_float(T{uint16_t(both >> 16)})};
}

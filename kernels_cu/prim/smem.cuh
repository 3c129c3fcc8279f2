// smem: shared memory. A kernel declares all of it in one `struct Smem` and reaches it through
// `dynamic_smem<Smem>()`.
#pragma once
#include "prim/num.cuh"

template <class Smem> DEVICE Smem& dynamic_smem() {
#if defined(CUATTN_SIMT)
  return *static_cast<Smem*>(simt::shared_base());
#else
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  return *reinterpret_cast<Smem*>(shared_bytes);
#endif
}

/// The 32-bit address that ldmatrix and cp.async take.
DEVICE uint32_t shared_address(const void* p) {
#if defined(CUATTN_SIMT)
  return uint32_t(static_cast<const unsigned char*>(p) - static_cast<unsigned char*>(simt::shared_base()));
#else
  return uint32_t(__cvta_generic_to_shared(p));
#endif
}

template <class T> DEVICE T load_shared(const T* p SITE) {
#if defined(CUATTN_SIMT)
  return simt::load_shared(p AT_SITE);
#else
  return *p;
#endif
}

template <class T> DEVICE void store_shared(T* p, T v SITE) {
#if defined(CUATTN_SIMT)
  simt::store_shared(p, v AT_SITE);
#else
  *p = v;
#endif
}

/// A tile of 16-bit elements. Rows are padded by 16 bytes: with COLS a multiple of 16, eight consecutive rows
/// start in eight different 16-byte bank groups, so ldmatrix is free of conflicts, and addresses stay linear
/// (no swizzle to compute).
template <class T, int ROWS_, int COLS_> struct SmemTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_, STRIDE = COLS_ + 8;
  static_assert(sizeof(T) == 2, "tiles hold 16-bit elements");
  static_assert(COLS % 16 == 0, "a row must be whole mma steps of 16 elements");
  alignas(16) T element[ROWS * STRIDE];

  METHOD T* at(int row, int col) { return element + row * STRIDE + col; }
  METHOD const T* at(int row, int col) const { return element + row * STRIDE + col; }
};

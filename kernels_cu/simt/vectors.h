// vectors: eight 16-bit floats at a time, transposed and widened. For the products of mma.cc and tensor.h.
#pragma once
#include "state.h"

namespace simt {

typedef float Float8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t Word8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t Int8 __attribute__((vector_size(32), aligned(4)));
typedef uint16_t Half8 __attribute__((vector_size(16), aligned(2)));

#if defined(__clang__) || __GNUC__ >= 12
#define SIMT_INTERLEAVE(a, b, half)                                                               \
  __builtin_shufflevector(a, b, half * 4, half * 4 + 8, half * 4 + 1, half * 4 + 9, half * 4 + 2, \
                          half * 4 + 10, half * 4 + 3, half * 4 + 11)
#else
#define SIMT_INTERLEAVE(a, b, half)                                                                        \
  __builtin_shuffle(a, b,                                                                                  \
                    Half8{half * 4, half * 4 + 8, half * 4 + 1, half * 4 + 9, half * 4 + 2, half * 4 + 10, \
                          half * 4 + 3, half * 4 + 11})
#endif

/// Transposes 8 × 8 elements: three rounds in which row i is interleaved with row i + 4.
SIMT_INLINE void transpose(Half8 (&m)[8]) {
  for (int round = 0; round < 3; ++round) {
    Half8 n[8];
    for (int i = 0; i < 4; ++i) {
      n[2 * i] = SIMT_INTERLEAVE(m[i], m[i + 4], 0);
      n[2 * i + 1] = SIMT_INTERLEAVE(m[i], m[i + 4], 1);
    }
    memcpy(m, n, sizeof m);
  }
}
#undef SIMT_INTERLEAVE

/// Eight 16-bit floats, each in the low half of a word. NOTE: denormal float16 numbers go by way of integers,
/// because they must survive while the machine flushes denormal float32 numbers.
template <bool BF16> SIMT_INLINE void widen(const Word8& h, Float8& out) {
  Word8 bits;
  if constexpr (BF16) {
    bits = h << 16;
  } else {
    Word8 magnitude = h & 0x7fffu;
    Word8 denormal = (Word8)(__builtin_convertvector((Int8)magnitude, Float8) * 5.9604644775390625e-8f);
    Word8 normal = (magnitude << 13) + 0x38000000u, special = (magnitude << 13) | 0x7f800000u;
    bits = magnitude < 0x400u ? denormal : magnitude >= 0x7c00u ? special : normal;
    bits |= (h & 0x8000u) << 16;
  }
  out = (Float8)bits;
}

}  // namespace simt

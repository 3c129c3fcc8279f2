// mma: ldmatrix, stmatrix and mma.sync.m16n8k16, with the fragment layouts of the PTX manual.
//
// Fragments are deposited in the warp's MmaBuffer where the product wants them. A lane's slots are written by
// that lane and by the last lane of the call alone, so the buffer is free again as soon as every lane has
// come to the next call.
#pragma once
#include "warp.h"

namespace simt {

typedef float Float8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t Word8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t Int8 __attribute__((vector_size(32), aligned(4)));
typedef uint16_t Half8 __attribute__((vector_size(16), aligned(2)));

// ---- ldmatrix

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

/// Lane 4 r + t gets elements 2 t and 2 t + 1 of row r: in lane order a matrix is its rows, one after the
/// other.
__attribute__((noinline)) inline void ldmatrix_all(MmaBuffer& buffer, int count, bool trans) {
  for (int i = 0; i < count; ++i) {
    Half8 m[8];
    for (int r = 0; r < 8; ++r) memcpy(m + r, buffer.row[i * 8 + r], 16);
    if (trans) transpose(m);
    memcpy(buffer.matrix[i], m, sizeof m);
  }
}

/// `count` (1, 2 or 4) 8 × 8 matrices of 16-bit elements; lane i gives row i % 8 of matrix i / 8. Lanes past
/// 8·count give an address that is not read.
SIMT_INLINE void ldmatrix(uint32_t* r, int count, bool trans, const void* s_row, Site site = Site::here()) {
  if (count != 1 && count != 2 && count != 4) [[unlikely]]
    fail(site, "ldmatrix of %d matrices: expected 1, 2 or 4", count);
  int lane = current->lane;
  MmaBuffer& buffer = current->warp->mma;
  if (lane < 8 * count) {
    buffer.row[lane] = translate_shared(s_row, 16, 16, Touch::read, site);
    if (machine.watched) [[unlikely]]
      watch_shared(shared_offset(s_row), 16, Touch::read, Access::ldmatrix, site);
  }
  meet(ALL, Access::ldmatrix, nullptr, [&](void**, uint32_t) { ldmatrix_all(buffer, count, trans); }, site);
  for (int i = 0; i < count; ++i) r[i] = buffer.matrix[i][lane];
}

// ---- stmatrix

__attribute__((noinline)) inline void stmatrix_all(MmaBuffer& buffer, int count, bool trans) {
  for (int i = 0; i < count; ++i) {
    Half8 m[8];
    memcpy(m, buffer.matrix[i], sizeof m);
    if (trans) transpose(m);
    for (int r = 0; r < 8; ++r) memcpy(const_cast<char*>(buffer.row[i * 8 + r]), m + r, 16);
  }
}

/// ldmatrix the other way: from registers to shared memory.
SIMT_INLINE void stmatrix(const uint32_t* r, int count, bool trans, void* s_row, Site site = Site::here()) {
  int lane = current->lane;
  MmaBuffer& buffer = current->warp->mma;
  if (lane < 8 * count) {
    buffer.row[lane] = translate_shared(s_row, 16, 16, Touch::write, site);
    if (machine.watched) [[unlikely]]
      watch_shared(shared_offset(s_row), 16, Touch::write, Access::stmatrix, site);
  }
  for (int i = 0; i < count; ++i) buffer.matrix[i][lane] = r[i];
  meet(ALL, Access::stmatrix, nullptr, [&](void**, uint32_t) { stmatrix_all(buffer, count, trans); }, site);
}

// ---- mma.sync

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

/// d += a b for a warp, one product after the other in k.
template <bool BF16> SIMT_INLINE void mma_all(MmaBuffer& buffer) {
  // Fragment a[i] holds rows 8 (i % 2)… and columns 8 (i / 2)…; a word holds two neighbours along k.
  Float8 a_even[4][4], a_odd[4][4], b[16];
  for (int i = 0; i < 4; ++i)
    for (int rows = 0; rows < 4; ++rows) {
      Word8 words;
      memcpy(&words, buffer.a[i] + rows * 8, sizeof words);
      widen<BF16>(words & 0xffffu, a_even[i][rows]);
      widen<BF16>(words >> 16, a_odd[i][rows]);
    }
  for (int i = 0; i < 8; ++i) {
    Word8 words;
    memcpy(&words, buffer.b[i], sizeof words);
    widen<BF16>(words & 0xffffu, b[2 * i]);
    widen<BF16>(words >> 16, b[2 * i + 1]);
  }
  const float *even = reinterpret_cast<float*>(a_even), *odd = reinterpret_cast<float*>(a_odd);
  for (int g = 0; g < 8; ++g) {
    Float8 low, high;
    memcpy(&low, buffer.d[0] + 8 * g, sizeof low);
    memcpy(&high, buffer.d[1] + 8 * g, sizeof high);
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; ++pair) {
      int at = pair / 4 * 64 + g * 4 + pair % 4;
      low += even[at] * b[2 * pair];
      high += even[at + 32] * b[2 * pair];
      low += odd[at] * b[2 * pair + 1];
      high += odd[at + 32] * b[2 * pair + 1];
    }
    memcpy(buffer.d[0] + 8 * g, &low, sizeof low);
    memcpy(buffer.d[1] + 8 * g, &high, sizeof high);
  }
}

// The same body for the CPU at hand: one shared object serves every CPU of an architecture, with equal bits.
typedef void (*MmaFunction)(MmaBuffer&);
inline void mma_bf16(MmaBuffer& buffer) { mma_all<true>(buffer); }
inline void mma_f16(MmaBuffer& buffer) { mma_all<false>(buffer); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void mma_bf16_avx2(MmaBuffer& buffer) { mma_all<true>(buffer); }
__attribute__((target("avx2"))) inline void mma_f16_avx2(MmaBuffer& buffer) { mma_all<false>(buffer); }
__attribute__((visibility("hidden"))) inline const MmaFunction mma_functions[2] = {
    __builtin_cpu_supports("avx2") ? mma_f16_avx2 : mma_f16,
    __builtin_cpu_supports("avx2") ? mma_bf16_avx2 : mma_bf16};
#else
constexpr MmaFunction mma_functions[2] = {mma_f16, mma_bf16};
#endif

/// d += a b, 16 × 8 × 16, accumulated in float32.
SIMT_INLINE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16,
                              Site site = Site::here()) {
  int lane = current->lane;
  MmaBuffer& buffer = current->warp->mma;
  for (int i = 0; i < 4; ++i) buffer.a[i][lane] = a[i];
  for (int i = 0; i < 2; ++i) buffer.b[i * 4 + lane % 4][lane / 4] = b[i];
  for (int i = 0; i < 4; ++i) buffer.d[i / 2][lane * 2 + i % 2] = d[i];
  meet(
      ALL, Access::mma, nullptr,
      [&](void**, uint32_t) {
        ++machine.counters.mma;
        mma_functions[bf16](buffer);
      },
      site);
  for (int i = 0; i < 4; ++i) d[i] = buffer.d[i / 2][lane * 2 + i % 2];
}

}  // namespace simt

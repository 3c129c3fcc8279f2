// mma: ldmatrix and mma.sync.m16n8k16, with the fragment layouts of the PTX manual.
#pragma once
#include "warp.h"

namespace simt {

struct LdMatrix {
  uint32_t* registers;
  const char* row;
};

template <int COUNT, bool TRANS> inline void ldmatrix_all(void** lanes, uint32_t) {
  for (int i = 0; i < COUNT; ++i) {
    const char* row[8];
    for (int r = 0; r < 8; ++r) row[r] = static_cast<LdMatrix*>(lanes[i * 8 + r])->row;
    for (int lane = 0; lane < LANES; ++lane) {
      uint32_t* to = static_cast<LdMatrix*>(lanes[lane])->registers + i;
      if constexpr (!TRANS) {
        memcpy(to, row[lane / 4] + lane % 4 * 4, 4);
      } else {
        uint16_t pair[2];
        memcpy(pair, row[lane % 4 * 2] + lane / 4 * 2, 2);
        memcpy(pair + 1, row[lane % 4 * 2 + 1] + lane / 4 * 2, 2);
        memcpy(to, pair, 4);
      }
    }
  }
}

/// `count` (1, 2 or 4) 8 × 8 matrices of 16-bit elements; lane i gives row i % 8 of matrix i / 8. Lanes past 8·count give
/// an address that is not read.
inline void ldmatrix(uint32_t* r, int count, bool trans, const void* s_row, Site site = Site::here()) {
  if (current->lane < 8 * count) check_shared(s_row, 16, 16, Access::read, site);
  LdMatrix mine{r, static_cast<const char*>(s_row)};
  switch (count * 2 + trans) {
    case 2: return meet(ALL, Kind::ldmatrix, &mine, ldmatrix_all<1, false>, site);
    case 3: return meet(ALL, Kind::ldmatrix, &mine, ldmatrix_all<1, true>, site);
    case 4: return meet(ALL, Kind::ldmatrix, &mine, ldmatrix_all<2, false>, site);
    case 5: return meet(ALL, Kind::ldmatrix, &mine, ldmatrix_all<2, true>, site);
    case 8: return meet(ALL, Kind::ldmatrix, &mine, ldmatrix_all<4, false>, site);
    case 9: return meet(ALL, Kind::ldmatrix, &mine, ldmatrix_all<4, true>, site);
    default: fail(site, "ldmatrix of %d matrices: expected 1, 2 or 4", count);
  }
}

struct Mma {
  float* d;
  const uint32_t *a, *b;
};

typedef float Float8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t Word8 __attribute__((vector_size(32), aligned(4)));

/// Eight 16-bit floats, each in the low half of a word. NOTE: integers all the way, because denormal float16 numbers must
/// survive while the machine flushes denormal float32 numbers.
template <bool BF16> SIMT_INLINE void widen(Word8 h, float* out) {
  Word8 bits;
  if constexpr (BF16) {
    bits = h << 16;
  } else {
    Word8 magnitude = h & 0x7fffu;
    typedef int32_t Int8 __attribute__((vector_size(32), aligned(4)));
    Word8 denormal = (Word8)(__builtin_convertvector((Int8)magnitude, Float8) * 5.9604644775390625e-8f);
    Word8 normal = (magnitude << 13) + 0x38000000u, special = (magnitude << 13) | 0x7f800000u;
    bits = magnitude < 0x400u ? denormal : magnitude >= 0x7c00u ? special : normal;
    bits |= (h & 0x8000u) << 16;
  }
  memcpy(out, &bits, sizeof bits);
}

/// d += a b for a warp, one product after the other in k. NOTE: products of 16-bit floats are exact in float32, so whether
/// the CPU fuses multiply and add changes no bit.
template <bool BF16> SIMT_INLINE void mma_all(void** lanes) {
  alignas(32) float a[16][16], b[16][8];
  alignas(32) uint32_t a_words[4][8][4], b_words[2][4][8];
  for (int lane = 0; lane < LANES; ++lane) {
    const Mma& m = *static_cast<const Mma*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) a_words[i][lane / 4][lane % 4] = m.a[i];
    for (int i = 0; i < 2; ++i) b_words[i][lane % 4][lane / 4] = m.b[i];
  }
  // Fragment a[i]: rows 8 (i % 2)…, columns 8 (i / 2)…; a word holds two neighbours along k.
  for (int i = 0; i < 4; ++i)
    for (int g = 0; g < 8; g += 2) {
      Word8 words;
      memcpy(&words, a_words[i][g], sizeof words);
      alignas(32) float even[8], odd[8];
      widen<BF16>(words & 0xffffu, even), widen<BF16>(words >> 16, odd);
      for (int t = 0; t < 8; ++t) {
        float* row = a[g + t / 4 + i % 2 * 8] + i / 2 * 8 + t % 4 * 2;
        row[0] = even[t], row[1] = odd[t];
      }
    }
  for (int i = 0; i < 2; ++i)
    for (int t = 0; t < 4; ++t) {
      Word8 words;
      memcpy(&words, b_words[i][t], sizeof words);
      widen<BF16>(words & 0xffffu, b[i * 8 + t * 2]), widen<BF16>(words >> 16, b[i * 8 + t * 2 + 1]);
    }
  for (int g = 0; g < 8; ++g) {
    alignas(32) float rows[2][8];
    for (int t = 0; t < 4; ++t) {
      const float* d = static_cast<const Mma*>(lanes[g * 4 + t])->d;
      memcpy(rows[0] + 2 * t, d, 8), memcpy(rows[1] + 2 * t, d + 2, 8);
    }
    Float8 low = *(Float8*)rows[0], high = *(Float8*)rows[1];
    for (int k = 0; k < 16; ++k) {
      Float8 column = *(Float8*)b[k];
      low += a[g][k] * column;
      high += a[g + 8][k] * column;
    }
    memcpy(rows[0], &low, 32), memcpy(rows[1], &high, 32);
    for (int t = 0; t < 4; ++t) {
      float* d = static_cast<const Mma*>(lanes[g * 4 + t])->d;
      memcpy(d, rows[0] + 2 * t, 8), memcpy(d + 2, rows[1] + 2 * t, 8);
    }
  }
}

// The same body for the CPU at hand: one shared object serves every CPU of an architecture.
inline void mma_bf16_plain(void** lanes, uint32_t) { mma_all<true>(lanes); }
inline void mma_f16_plain(void** lanes, uint32_t) { mma_all<false>(lanes); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void mma_bf16_avx2(void** lanes, uint32_t) { mma_all<true>(lanes); }
__attribute__((target("avx2"))) inline void mma_f16_avx2(void** lanes, uint32_t) { mma_all<false>(lanes); }
__attribute__((visibility("hidden"))) inline const bool has_avx2 = __builtin_cpu_supports("avx2");
#else
constexpr bool has_avx2 = false;
inline void mma_bf16_avx2(void**, uint32_t) {}
inline void mma_f16_avx2(void**, uint32_t) {}
#endif

/// d += a b, 16 × 8 × 16, accumulated in float32.
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16,
                         Site site = Site::here()) {
  Mma mine{d, a, b};
  meet(ALL, Kind::mma, &mine, [bf16](void** lanes, uint32_t all) {
    ++machine.counters.mma;
    if (has_avx2) return bf16 ? mma_bf16_avx2(lanes, all) : mma_f16_avx2(lanes, all);
    return bf16 ? mma_bf16_plain(lanes, all) : mma_f16_plain(lanes, all);
  }, site);
}

}  // namespace simt

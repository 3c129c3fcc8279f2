#include "mma.h"

#include "vectors.h"

namespace simt {

/// Lane 4 r + t gets elements 2 t and 2 t + 1 of row r: in lane order a matrix is its rows, one after the
/// other.
void ldmatrix_all(MmaBuffer& buffer, int count, bool trans) {
  for (int i = 0; i < count; ++i) {
    Half8 m[8];
    for (int r = 0; r < 8; ++r) memcpy(m + r, buffer.row[i * 8 + r], 16);
    if (trans) transpose(m);
    memcpy(buffer.matrix[i], m, sizeof m);
  }
}

void stmatrix_all(MmaBuffer& buffer, int count, bool trans) {
  for (int i = 0; i < count; ++i) {
    Half8 m[8];
    memcpy(m, buffer.matrix[i], sizeof m);
    if (trans) transpose(m);
    for (int r = 0; r < 8; ++r) memcpy(const_cast<char*>(buffer.row[i * 8 + r]), m + r, 16);
  }
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

// The same body for the CPU at hand.
static void mma_bf16(MmaBuffer& buffer) { mma_all<true>(buffer); }
static void mma_f16(MmaBuffer& buffer) { mma_all<false>(buffer); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void mma_bf16_avx2(MmaBuffer& buffer) { mma_all<true>(buffer); }
__attribute__((target("avx2"))) static void mma_f16_avx2(MmaBuffer& buffer) { mma_all<false>(buffer); }
const MmaFunction mma_functions[2] = {
    __builtin_cpu_supports("avx2") ? mma_f16_avx2 : mma_f16,
    __builtin_cpu_supports("avx2") ? mma_bf16_avx2 : mma_bf16};
#else
const MmaFunction mma_functions[2] = {mma_f16, mma_bf16};
#endif

}  // namespace simt

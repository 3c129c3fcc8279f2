// tensor: the arithmetic of wgmma. d (64 × N) += a (64 × K) b (K × N) in float32, one exact product after the
// other along k, as mma.sync does here; also for e4m3, of which a tensor core keeps 13 bits (prim/wgmma.cuh).
//
// A lane of an accumulator holds, of its two rows, columns 8 t + 2 q + e for q its place in the quad, e = 0,
// 1 and all t. So the accumulators lie in four planes, one for each q: a lane's share is two whole rows of a
// plane, and the product is four plain ones of 64 × K by K × N/4, whose inner loop runs along a row.
#pragma once
#include "vectors.h"
#include "warpgroup.h"

namespace simt {

constexpr int WGMMA_M = 64, WGMMA_MAX_N = 256;
constexpr int depth_of(Element e) { return e == Element::e4m3 ? 32 : 16; }
/// Floats from one row of a plane to the next.
constexpr int plane_stride(int n) { return (n / 4 + 7) / 8 * 8; }

typedef float Float16 __attribute__((vector_size(64), aligned(4)));
typedef float Pair2 __attribute__((vector_size(8), aligned(4)));

/// A warpgroup's operands as numbers: `raw` as they come, then as float32.
struct alignas(64) TensorBuffer {
  uint8_t raw_a[WGMMA_M][32];         // [row][k]
  uint16_t raw_b[16][WGMMA_MAX_N];    // [k][column]; of e4m3 as bytes, [column][k]
  float a[WGMMA_M * 32];              // [row][k]
  float b[4 * 32 * WGMMA_MAX_N / 4];  // [plane][k][plane_stride]
};

inline float e4m3_value(uint8_t x) {
  int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 0x7f) == 0x7f) return __builtin_nanf("");
  float magnitude = exponent ? float(8 + mantissa) * float(1 << exponent) / 1024.f : float(mantissa) / 512.f;
  return x & 0x80 ? -magnitude : magnitude;
}

template <bool BF16> SIMT_INLINE void widen8(const void* from, Float8& to) {
  Half8 h;
  memcpy(&h, from, sizeof h);
  widen<BF16>(__builtin_convertvector(h, Word8), to);
}

/// raw → float32.
template <bool BF16> SIMT_INLINE void widen_operands(TensorBuffer& t, int n) {
  int stride = plane_stride(n);
  for (int i = 0; i < WGMMA_M * 2; ++i) {
    Float8 x;
    widen8<BF16>(t.raw_a[0] + i * 16, x);
    memcpy(t.a + i * 8, &x, sizeof x);
  }
  for (int k = 0; k < 16; ++k)
    for (int tile = 0; tile < n / 8; ++tile) {
      Float8 x;
      widen8<BF16>(t.raw_b[k] + tile * 8, x);
      for (int q = 0; q < 4; ++q) memcpy(t.b + (q * 16 + k) * stride + tile * 2, (char*)&x + q * 8, 8);
    }
}
inline void widen_e4m3(TensorBuffer& t, int n) {
  static const struct Table {
    float value[256];
    Table() {
      for (int i = 0; i < 256; ++i) value[i] = e4m3_value(uint8_t(i));
    }
  } table;
  const uint8_t* b = reinterpret_cast<const uint8_t*>(t.raw_b);
  for (int i = 0; i < WGMMA_M * 32; ++i) t.a[i] = table.value[t.raw_a[0][i]];
  for (int column = 0; column < n; ++column)
    for (int k = 0; k < 32; ++k)
      t.b[(column % 8 / 2 * 32 + k) * plane_stride(n) + column / 8 * 2 + column % 2] =
          table.value[b[column * 32 + k]];
}

/// ROWS rows of a plane, one vector wide.
template <class Vector, int ROWS>
SIMT_INLINE void multiply_strip(float* d, const float* a, const float* b, int stride, int depth) {
  Vector sum[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) memcpy(&sum[r], d + r * stride, sizeof(Vector));
  for (int k = 0; k < depth; ++k) {
    Vector row;
    memcpy(&row, b + k * stride, sizeof row);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sum[r] += a[r * depth + k] * row;
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) memcpy(d + r * stride, &sum[r], sizeof(Vector));
}
template <class Vector, int ROWS>
SIMT_INLINE void multiply_planes(float* d, const TensorBuffer& t, int n, int depth) {
  constexpr int WIDE = sizeof(Vector) / 4;
  int stride = plane_stride(n);
  for (int q = 0; q < 4; ++q)
    for (int r = 0; r < WGMMA_M; r += ROWS) {
      float* rows = d + (q * WGMMA_M + r) * stride;
      const float *a = t.a + r * depth, *b = t.b + q * depth * stride;
      int column = 0;
      for (; column + WIDE <= stride; column += WIDE)
        multiply_strip<Vector, ROWS>(rows + column, a, b + column, stride, depth);
      if (column < stride) multiply_strip<Float8, ROWS>(rows + column, a, b + column, stride, depth);
    }
}

/// d += a b of what `raw` holds.
template <class Vector, int ROWS>
SIMT_INLINE void wgmma_all(float* d, TensorBuffer& t, int n, Element element) {
  if (element == Element::bf16)
    widen_operands<true>(t, n);
  else if (element == Element::f16)
    widen_operands<false>(t, n);
  else
    widen_e4m3(t, n);
  multiply_planes<Vector, ROWS>(d, t, n, depth_of(element));
}

// The same body for the CPU at hand, with equal bits.
typedef void (*WgmmaFunction)(float*, TensorBuffer&, int, Element);
#if defined(__clang__)
#define SIMT_FAST
#else
#define SIMT_FAST __attribute__((optimize("O3")))  // also where kernels are built to start soon
#endif
SIMT_FAST inline void wgmma_plain(float* d, TensorBuffer& t, int n, Element e) {
  wgmma_all<Float8, 4>(d, t, n, e);
}
#if defined(__x86_64__)
SIMT_FAST
    __attribute__((target("avx2"))) inline void wgmma_avx2(float* d, TensorBuffer& t, int n, Element e) {
  wgmma_all<Float8, 8>(d, t, n, e);
}
SIMT_FAST __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) inline void wgmma_avx512(
    float* d, TensorBuffer& t, int n, Element e) {
  wgmma_all<Float16, 8>(d, t, n, e);
}
__attribute__((visibility("hidden"))) inline const WgmmaFunction wgmma_function =
    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw")
        ? wgmma_avx512
    : __builtin_cpu_supports("avx2") ? wgmma_avx2
                                     : wgmma_plain;
#else
constexpr WgmmaFunction wgmma_function = wgmma_plain;
#endif
#undef SIMT_FAST

}  // namespace simt

// mma: ldmatrix, stmatrix and mma.sync.m16n8k16, with the fragment layouts of the PTX manual.
//
// Fragments are deposited in the warp's MmaBuffer where the product wants them. A lane's slots are written by
// that lane and by the last lane of the call alone, so the buffer is free again as soon as every lane has
// come to the next call.
#pragma once
#include "warp.h"

namespace simt {

// ---- ldmatrix

void ldmatrix_all(MmaBuffer& buffer, int count, bool trans);

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

void stmatrix_all(MmaBuffer& buffer, int count, bool trans);

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

// For the CPU at hand: one shared object serves every CPU of an architecture, with equal bits.
typedef void (*MmaFunction)(MmaBuffer&);
extern const MmaFunction mma_functions[2];  // of float16, of bfloat16

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

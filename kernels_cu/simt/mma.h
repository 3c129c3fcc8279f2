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
SIMT_CALL void ldmatrix(uint32_t* r, int count, bool trans, const void* s_row, Site site = Site::here());

// ---- stmatrix

void stmatrix_all(MmaBuffer& buffer, int count, bool trans);

/// ldmatrix the other way: from registers to shared memory.
SIMT_CALL void stmatrix(const uint32_t* r, int count, bool trans, void* s_row, Site site = Site::here());

// ---- mma.sync

// For the CPU at hand: one shared object serves every CPU of an architecture, with equal bits.
typedef void (*MmaFunction)(MmaBuffer&);
extern const MmaFunction mma_functions[2];  // of float16, of bfloat16

/// d += a b, 16 × 8 × 16, accumulated in float32.
SIMT_CALL void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16,
                            Site site = Site::here());

}  // namespace simt

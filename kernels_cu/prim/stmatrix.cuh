// stmatrix: what ldmatrix does, the other way (sm_90): 8 × 8 matrices of 16-bit elements from a warp's
// registers to shared memory. Lane l gives the address of row l % 8 of matrix l / 8, and holds elements
// 2·(l%4) and the next of row l/4 of each; transposed, of column l/4.
#pragma once
#include "prim/smem.cuh"

#if defined(CUATTN_SIMT)
#define STMATRIX(count, trans, text, operands, ...) simt::stmatrix(r, count, trans, s_row AT_SITE)
#else
#define STMATRIX(count, trans, text, operands, ...)                             \
  asm volatile("stmatrix.sync.aligned.m8n8." text ".shared.b16 [%0], " operands \
               ";" ::"r"(shared_address(s_row)),                                \
               __VA_ARGS__                                                      \
               : "memory")
#endif

/// PTX stmatrix.x1.
DEVICE void stmatrix_x1(void* s_row, const uint32_t (&r)[1] SITE) {
  STMATRIX(1, false, "x1", "{%1}", "r"(r[0]));
}
DEVICE void stmatrix_x1_trans(void* s_row, const uint32_t (&r)[1] SITE) {
  STMATRIX(1, true, "x1.trans", "{%1}", "r"(r[0]));
}
/// PTX stmatrix.x2.
DEVICE void stmatrix_x2(void* s_row, const uint32_t (&r)[2] SITE) {
  STMATRIX(2, false, "x2", "{%1, %2}", "r"(r[0]), "r"(r[1]));
}
DEVICE void stmatrix_x2_trans(void* s_row, const uint32_t (&r)[2] SITE) {
  STMATRIX(2, true, "x2.trans", "{%1, %2}", "r"(r[0]), "r"(r[1]));
}
/// PTX stmatrix.x4.
DEVICE void stmatrix_x4(void* s_row, const uint32_t (&r)[4] SITE) {
  STMATRIX(4, false, "x4", "{%1, %2, %3, %4}", "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]));
}
DEVICE void stmatrix_x4_trans(void* s_row, const uint32_t (&r)[4] SITE) {
  STMATRIX(4, true, "x4.trans", "{%1, %2, %3, %4}", "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]));
}

#undef STMATRIX

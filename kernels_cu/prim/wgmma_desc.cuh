// wgmma_desc: how the tensor cores are told where a matrix lies in shared memory (sm_90).
//
// A matrix of wgmma is made of cores: eight lines of 16 bytes. K-major, a line is a row of A (a column of B)
// and its 16 bytes run along k; a product takes two cores along k. MN-major, a line is a step of k and its 16
// bytes run along the rows of A (the columns of B); a product takes 16 lines of k. Two distances say how the
// cores lie, and a swizzle how the bytes of a core do:
//
//   swizzle    core lines are    K-major: stride | leading       MN-major: stride | leading
//   none       16 bytes apart    8 rows on | next 16 bytes of k  next 8 columns | 8 k on
//   32…128     one width apart   8 rows on | not used            8 k on | next `width` bytes of columns
//
// So with a swizzle of 128 bytes, a tile of rows of 64 16-bit elements, each row right behind the other, has
// its next eight rows 1024 bytes on. One that is 128 elements wide is two such panels side by side. The
// swizzle works on addresses: a step along k inside the width moves the start address and nothing else.
#pragma once
#include "prim/smem.cuh"

enum class Major { K, MN };

/// The swizzle's field of a descriptor, by its width in bytes; 0 is none.
template <int WIDTH> constexpr uint64_t swizzle_field() {
  static_assert(WIDTH == 0 || WIDTH == 32 || WIDTH == 64 || WIDTH == 128,
                "a swizzle is 0, 32, 64 or 128 bytes wide");
  return uint64_t(WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : WIDTH == 32 ? 3 : 0) << 62;
}

/// A descriptor in full. `leading` and `stride` are the distances above, in bytes; they and the start are
/// multiples of 16. `first_line`: bits 7…9 of the address where the swizzle's pattern begins, if that is no
/// multiple of eight widths.
template <int WIDTH>
DEVICE uint64_t matrix_descriptor(const void* s_start, int leading, int stride, int first_line = 0 SITE) {
  const uint32_t start = shared_address(s_start);
#if defined(CUATTN_SIMT)
  if (start % 16 || leading % 16 || stride % 16 || leading < 0 || stride < 0 || (leading | stride) >= 1 << 18)
    simt::fail(
        site,
        "a matrix descriptor of start %u, leading offset %d, stride offset %d: expected multiples of 16 "
        "below 2^18",
        start, leading, stride);
#endif
  return uint64_t((start & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
         uint64_t(first_line & 7) << 49 | swizzle_field<WIDTH>();
}

/// The same matrix, `bytes` further on. NOTE: shared memory ends before a carry would, so that only the lower
/// half changes. What it is the compiler is not told: knowing that nothing carries, it would add 64 bits.
DEVICE uint64_t advance(uint64_t descriptor, int bytes) {
  uint32_t lower = uint32_t(descriptor);
#if !defined(CUATTN_SIMT)
  asm("" : "+r"(lower));
#endif
  return (descriptor & 0xffffffff00000000) | uint32_t(lower + (bytes >> 4));
}

/// A tile of 16-bit elements as wgmma and tensor copies want it: panels of WIDTH bytes a row, one after the
/// other, each swizzled. A box of a tensor copy with that swizzle and as many rows fills one panel.
/// NOTE: dynamic shared memory begins on a multiple of 1024 where a kernel has no other, so a tile does so too.
template <class T, int ROWS_, int COLS_, int WIDTH_ = 128> struct SwizzledTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_, WIDTH = WIDTH_;
  static constexpr int PANEL_COLS = WIDTH / int(sizeof(T)), PANEL_BYTES = ROWS * WIDTH,
                       PANELS = COLS / PANEL_COLS;
  static_assert(sizeof(T) == 2, "tiles hold 16-bit elements");
  static_assert(WIDTH == 32 || WIDTH == 64 || WIDTH == 128, "a swizzle is 32, 64 or 128 bytes wide");
  static_assert(ROWS % 8 == 0 && COLS % PANEL_COLS == 0, "whole cores in whole panels");
  alignas(1024) T element[ROWS * COLS];

  /// Address of an element; eight from a multiple of eight on lie together.
  METHOD T* at(int row, int col) { return element + place(row, col); }
  METHOD const T* at(int row, int col) const { return element + place(row, col); }
  /// The first element of a panel.
  METHOD T* panel(int i) { return element + i * ROWS * PANEL_COLS; }

  /// The operand whose rows (for B: columns) are the tile's rows from `row` on, and whose k starts at column
  /// `k`.
  METHOD uint64_t k_major(int row, int k SITE) const {
    const int at = (k / PANEL_COLS * ROWS + row) * PANEL_COLS + k % PANEL_COLS;
    return advance(matrix_descriptor<WIDTH>(element, 16, 8 * WIDTH, 0 AT_SITE), at * int(sizeof(T)));
  }
  /// The operand whose columns (for A: rows) are the tile's columns from `col` on, a multiple of a panel's,
  /// and whose k starts at row `k`, a multiple of eight.
  METHOD uint64_t mn_major(int k, int col SITE) const {
    const int at = (col / PANEL_COLS * ROWS + k) * PANEL_COLS;
    return advance(matrix_descriptor<WIDTH>(element, PANEL_BYTES, 8 * WIDTH, 0 AT_SITE), at * int(sizeof(T)));
  }

 private:
  static METHOD int place(int row, int col) {
    const int byte = row * WIDTH + col % PANEL_COLS * int(sizeof(T));
    const int swizzled = byte ^ ((byte >> 7 & (WIDTH / 16 - 1)) << 4);
    return col / PANEL_COLS * ROWS * PANEL_COLS + swizzled / int(sizeof(T));
  }
};

// swizzled: tiles in shared memory without padding.
//
// Eight rows of a 16-byte column must lie in eight bank groups for ldmatrix. SmemTile pads its rows, so that
// every other row begins in the middle of a 32-byte sector, and cp.async then reads each of its sectors twice.
// Here rows stay whole and trade places of their chunks instead.
#pragma once
#include "prim/smem.cuh"

/// A tile of 16-bit elements. Chunk c of a row lies at c ^ x: x counts through the PATTERN chunks that are traded,
/// and moves on once the rows have filled a line of 128 bytes in steps of PATTERN chunks.
template <class T, int ROWS_, int COLS_> struct SwizzledTile {
  static constexpr int ROWS = ROWS_, COLS = COLS_, CHUNKS = COLS_ / 8,
                       PATTERN = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  static_assert(sizeof(T) == 2, "tiles hold 16-bit elements");
  static_assert(COLS % 16 == 0, "a row must be whole mma steps of 16 elements");
  alignas(128) T element[ROWS * COLS];

  /// Of the first element of an 8-element chunk, or within it.
  METHOD int offset(int row, int col) const { return row * COLS + (col ^ row / (8 / PATTERN) % PATTERN * 8); }
  METHOD T* at(int row, int col) { return element + offset(row, col); }
  METHOD const T* at(int row, int col) const { return element + offset(row, col); }
};
